"""Wheels as pip builds, installs and removes them: of a checkout and of an sdist, with a C compiler and without.

Two modules are compiled, where it takes seconds. No registry is asked: the build takes its tools from the environment
that runs the tests, and what is installed finds there what the proxy needs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pdproxy.compiled.build import BuildError, check_tools
from pdproxy.compiled.stamp import SUFFIX
from tests.pdproxy.server.test_serve_process import process

ROOT = Path(__file__).parents[3]
FEW = ("pdproxy.ids", "pdproxy.openai.numbers")
TOOLS = {"msgspec", "mypy", "setuptools"}
NO_COMPILER = "to compile takes a C compiler, and there is none: apt install gcc"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that has but a few modules to compile, and in place an extension that is not the build's."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("pdproxy", "transfer"):
        left_out = shutil.ignore_patterns("__pycache__", "*.so", "stamp.json")
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    compile_only(folder, *FEW)
    (folder / "pdproxy" / f"errors{SUFFIX}").touch()
    return folder


def compile_only(folder: Path, *modules: str) -> None:
    (folder / "pdproxy" / "compiled" / "modules.py").write_text(f'"""The list."""\n\nMODULES = {modules!r}\n')


@pytest.fixture(scope="module")
def compiled(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        check_tools()
    except BuildError as error:
        pytest.skip(f"NOT TESTED, a compiled wheel: {error}")
    return wheel(checkout, tmp_path_factory.mktemp("compiled"), PDPROXY_COMPILE="1")


@pytest.fixture(scope="module")
def plain(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an sdist, without a compiler."""
    folder = tmp_path_factory.mktemp("plain")
    (sdist,) = hook(checkout, "build_sdist", str(folder)).stdout.split()[-1:]
    return wheel(folder / sdist, folder, **nothing_to_compile_with(folder))


def nothing_to_compile_with(folder: Path) -> dict[str, str]:
    return {"PATH": str(folder), "CC": ""}


def environment(**more: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PDPROXY_", "PYTHONPATH"))}
    return mine | more


def hook(checkout: Path, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Calls a function of the build as pip does, and prints what it returns."""
    program = f"import sys; sys.path[:0] = ['.']; import hatch_build; print(hatch_build.{name}(*sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment(**variables), capture_output=True, text=True)


def pip(*words: str | Path, **variables: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, cwd="/", env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel(source: Path, into: Path, **variables: str) -> Path:
    words = ("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", into, source)
    pip(*words, **variables)
    (built,) = into.glob("*.whl")
    return built


def install(wheel: Path, folder: Path) -> Path:
    """Returns the folder of the programs of a new environment, which has this wheel alone and borrows the rest."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip("--python", folder / "bin" / "python", "install", "--no-index", "--no-deps", "--no-compile", wheel)
    return folder / "bin"


def said(*command: str | Path) -> str:
    return subprocess.run(command, cwd="/", env=environment(), capture_output=True, text=True, check=True).stdout


def added(wheel: Path) -> set[str]:
    """Returns what is in the wheel's package and not in the checkout."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if name.startswith("pdproxy/") and not (ROOT / name).exists()}


def extensions(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so"))


# ── with a compiler ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wheel_has_the_extensions_and_their_stamp(compiled: Path) -> None:
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert compiled.name.startswith(f"pdproxy-0.1.0-{python}-{python}-linux_"), compiled.name
    made = [f"pdproxy/{name}{SUFFIX}" for name in ("compiled/all__mypyc", "ids", "openai/numbers")]
    assert extensions(compiled) == made
    assert "pdproxy/compiled/stamp.json" in zipfile.ZipFile(compiled).namelist()


def test_it_is_installed_and_answers_and_goes_without_a_rest(compiled: Path, tmp_path: Path) -> None:
    programs = install(compiled, tmp_path / "new")
    assert said(programs / "pdproxy", "--version") == "pdproxy 0.1.0, compiled\n"
    assert said(programs / "python", "-c", "import pdproxy.ids as it; print(it.__file__)").endswith(f"ids{SUFFIX}\n")
    assert asyncio.run(answer(programs / "pdproxy", tmp_path))["object"] == "text_completion"
    assert list(tmp_path.rglob("site-packages/pdproxy/*.so"))
    pip("--python", programs / "python", "uninstall", "--yes", "pdproxy")
    assert not list(tmp_path.rglob("site-packages/pdproxy"))


async def answer(program: Path, folder: Path) -> dict[str, Any]:
    """Returns what a proxy answers that is started by this program."""
    async with process(folder, program=("env", "-u", "PYTHONPATH", str(program))) as proxy:
        reply = await proxy.client.post("/v1/completions", json={"model": "tiny", "prompt": "a b"})
        return dict(reply.json())


def test_what_does_not_compile_is_left_plain(checkout: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkout, tmp_path / "copy")
    compile_only(copy, "pdproxy.no_such_module")
    done = hook(copy, "build_wheel", str(tmp_path))
    assert done.stdout.split()[-1] == "pdproxy-0.1.0-py3-none-any.whl"
    assert "This wheel is plain Python: it does not compile" in done.stdout + done.stderr
    assert "no_such_module" in done.stdout + done.stderr


def test_an_editable_install_stays_plain(checkout: Path, tmp_path: Path) -> None:
    name = hook(checkout, "build_editable", str(tmp_path)).stdout.split()[-1]
    assert extensions(tmp_path / name) == []
    assert name == "pdproxy-0.1.0-py3-none-any.whl"


def test_pip_learns_the_metadata_without_a_build(checkout: Path, tmp_path: Path) -> None:
    done = hook(checkout, "prepare_metadata_for_build_wheel", str(tmp_path), PIP_BUILD_TRACKER=str(tmp_path))
    assert done.stdout == "pdproxy-0.1.0.dist-info\n"


# ── without ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wheel_without_a_compiler_says_so(plain: Path, tmp_path: Path) -> None:
    assert plain.name == "pdproxy-0.1.0-py3-none-any.whl"
    assert extensions(plain) == []
    programs = install(plain, tmp_path)
    assert said(programs / "pdproxy", "--version") == f"pdproxy 0.1.0, plain Python: {NO_COMPILER}\n"


def test_it_fails_where_it_must_compile(checkout: Path, tmp_path: Path) -> None:
    variables = nothing_to_compile_with(tmp_path) | {"PDPROXY_COMPILE": "1"}
    done = hook(checkout, "build_wheel", str(tmp_path), **variables)
    assert done.returncode != 0
    assert NO_COMPILER in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_it_compiles_nothing_where_it_must_not(checkout: Path, tmp_path: Path) -> None:
    name = hook(checkout, "build_wheel", str(tmp_path), PDPROXY_COMPILE="0").stdout.split()[-1]
    stamp = zipfile.ZipFile(tmp_path / name).read("pdproxy/compiled/stamp.json").decode()
    assert extensions(tmp_path / name) == []
    assert "it was built with PDPROXY_COMPILE=0" in stamp


def test_another_wish_is_refused(checkout: Path, tmp_path: Path) -> None:
    done = hook(checkout, "build_wheel", str(tmp_path), PDPROXY_COMPILE="yes")
    assert "PDPROXY_COMPILE is 'yes'; it can be auto, 0 or 1" in done.stderr


@pytest.mark.parametrize(
    ("name", "variables", "is_asked"),
    [
        ("get_requires_for_build_wheel", {}, True),
        ("get_requires_for_build_wheel", {"PDPROXY_COMPILE": "0"}, False),
        ("get_requires_for_build_wheel", nothing_to_compile_with(Path("/nowhere")), False),
        ("get_requires_for_build_editable", {}, False),
        ("get_requires_for_build_sdist", {}, False),
    ],
)
def test_tools_are_asked_for_where_they_are_used(
    name: str, variables: dict[str, str], is_asked: bool, checkout: Path, compiled: Path
) -> None:
    """A tool that pip cannot get ends the installation."""
    told = hook(checkout, name, **variables).stdout
    assert {tool for tool in TOOLS if tool in told} == (TOOLS if is_asked else set())
