"""Compiled modules: what may be among them, and that none is run that is not of the sources beside it."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from pdproxy import cli
from pdproxy.compiled import build, command
from pdproxy.compiled.build import BuildError, compile_in_place, copy_into, remove
from pdproxy.compiled.choice import STALE, Choice, choose
from pdproxy.compiled.modules import MODULES
from pdproxy.compiled.stamp import PACKAGE, SUFFIX, Stamp, digest, read_stamp, write_stamp

SUSPENDING = (ast.Await, ast.Yield, ast.YieldFrom)


def source(module: str) -> Path:
    return PACKAGE.parent / f"{module.replace('.', '/')}.py"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small one, without extensions."""
    folder = tmp_path / "pdproxy"
    (folder / "compiled").mkdir(parents=True)
    (folder / "loadtest").mkdir()
    for name in ("one.py", "two.py", "loadtest/three.py"):
        (folder / name).write_text(f"NAME = {name!r}\n")
    return folder


@pytest.fixture
def made(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That, with "extensions"."""
    monkeypatch.setattr(build, "check_tools", lambda: None)
    monkeypatch.setattr(build, "_make", make)
    assert compile_in_place(package) == 2
    return package


def make(sources: Path, into: Path) -> None:
    (into / "pdproxy" / "compiled").mkdir(parents=True)
    for name in ("one", "compiled/all"):
        (into / "pdproxy" / f"{name}{SUFFIX}").write_bytes((sources / "pdproxy" / "one.py").read_bytes())


# ── the list ────────────────────────────────────────────────────────────────────────────────────────────────────────


class TestModules:
    def test_all_are_there_and_named_once(self) -> None:
        assert [name for name in MODULES if not source(name).is_file()] == []
        assert len(set(MODULES)) == len(MODULES)

    @pytest.mark.parametrize("module", MODULES)
    def test_none_waits_where_it_handles_an_exception(self, module: str) -> None:
        """mypyc keeps the exception that is handled for the thread, not for the coroutine: another one that handles its
        own meanwhile makes this one's vanish."""
        assert list(waits_in_handlers(ast.parse(source(module).read_text()))) == []

    @pytest.mark.parametrize("module", MODULES)
    def test_none_has_structs(self, module: str) -> None:
        """msgspec reads a class's annotations, which mypyc does not keep."""
        bases = [ast.unparse(base) for node in classes(module) for base in node.bases]
        assert not [base for base in bases if base.startswith("msgspec.")]

    @pytest.mark.parametrize("module", MODULES)
    def test_none_sets_what_an_uncompiled_base_has(self, module: str) -> None:
        """mypyc leaves out attributes of such a class: whoever asks the class finds those of its base."""
        tree = ast.parse(source(module).read_text())
        assert list(attributes_below_uncompiled(tree)) == []


def attributes_below_uncompiled(tree: ast.Module) -> Iterator[str]:
    foreign = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("pdproxy.")
        and node.module not in MODULES
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in foreign for base in node.bases):
            given = [target for each in node.body if isinstance(each, ast.Assign) for target in each.targets]
            names = [ast.unparse(target) for target in given]
            yield from (f"{node.name}.{name}" for name in names if name != "__slots__")


def test_attributes_are_found() -> None:
    tree = ast.parse("from pdproxy.errors import LegFailed\nclass A(LegFailed):\n    __slots__ = ()\n    code = 'a'")
    assert list(attributes_below_uncompiled(tree)) == ["A.code"]


def classes(module: str) -> Iterator[ast.ClassDef]:
    tree = ast.parse(source(module).read_text())
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def waits_in_handlers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            yield from waits(node.body)
        elif isinstance(node, ast.Try):
            yield from waits(node.finalbody)
        elif isinstance(node, ast.AsyncWith) and not ast.unparse(node.items[0]).startswith("asyncio.timeout"):
            yield f"line {node.lineno}"  # its end is awaited, and only a time limit's is known not to suspend


def waits(body: list[ast.stmt]) -> Iterator[str]:
    for node in (inner for each in body for inner in ast.walk(each)):
        if isinstance(node, SUSPENDING):
            yield f"line {node.lineno}"


def test_waits_are_found() -> None:
    text = "async def f():\n try:\n  await a\n except E:\n  await b\n finally:\n  await c\n async with d:\n  await e\n"
    assert list(waits_in_handlers(ast.parse(text))) == ["line 7", "line 8", "line 5"]


# ── no stale code ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_sources_only(package: Path) -> None:
    assert choose(package) == Choice("nobody has compiled it")
    assert not remove(package)


def test_compiled(made: Path) -> None:
    assert choose(made) == Choice()
    assert (made / f"one{SUFFIX}").is_file()


@pytest.mark.parametrize("name", ["one.py", "two.py", "new.py"])
def test_another_source(made: Path, name: str) -> None:
    (made / name).write_text("NAME = None\n")
    assert choose(made) == Choice(STALE, is_stale=True)


def test_a_source_less(made: Path) -> None:
    (made / "two.py").unlink()
    assert choose(made).is_stale


def test_what_they_have_nothing_to_do_with(made: Path) -> None:
    (made / "loadtest" / "three.py").write_text("NAME = None\n")
    assert choose(made) == Choice()


def test_compiled_again(made: Path) -> None:
    (made / "one.py").write_text("NAME = None\n")
    compile_in_place(made)
    assert choose(made) == Choice()
    assert (made / f"one{SUFFIX}").read_text() == "NAME = None\n"


def test_removed(made: Path) -> None:
    assert remove(made) == 2
    assert choose(made) == Choice("nobody has compiled it")
    assert list(made.rglob(f"*{SUFFIX}")) == []


def test_for_another_python(made: Path) -> None:
    """It does not see them."""
    for name in read_stamp(made).extensions:
        (made / name).rename(made / name.replace(SUFFIX, ".cpython-30.so"))
    assert choose(made) == Choice("it is compiled for another Python")


@pytest.mark.parametrize("told", [Stamp(), Stamp(why_plain="there was no compiler")])
def test_what_an_older_release_left_behind(package: Path, told: Stamp) -> None:
    """An update puts its sources and its stamp in place; extensions that pip did not know stay."""
    (package / f"one{SUFFIX}").touch()
    if told.why_plain:
        write_stamp(package, told)
    assert choose(package) == Choice(STALE, is_stale=True)


@pytest.mark.parametrize("name", [f"two{SUFFIX}", f"one{SUFFIX}"])
def test_one_more_or_less(made: Path, name: str) -> None:
    if (made / name).exists():
        (made / name).unlink()
    else:
        (made / name).touch()
    assert choose(made).is_stale


def test_built_without_them(package: Path) -> None:
    write_stamp(package, Stamp(why_plain="there was no compiler"))
    assert choose(package) == Choice("there was no compiler")


def test_killed_while_they_are_put_there(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(made: Path, path: Path) -> None:
        path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "check_tools", lambda: None)
    monkeypatch.setattr(build, "_make", make)
    monkeypatch.setattr(build, "_put", dies)
    with pytest.raises(KeyboardInterrupt):
        compile_in_place(package)
    assert choose(package).is_stale
    remove(package)
    assert not choose(package).is_stale


def test_what_does_not_compile_changes_nothing(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sources: Path, into: Path) -> None:
        raise BuildError("it does not compile")

    monkeypatch.setattr(build, "_make", fails)
    with pytest.raises(BuildError):
        compile_in_place(made)
    assert choose(made) == Choice()


@pytest.mark.parametrize("text", ["[]", "{}", "no JSON"])
def test_a_stamp_that_nobody_wrote(made: Path, text: str) -> None:
    (made / "compiled" / "stamp.json").write_text(text)
    assert choose(made).is_stale
    assert remove(made) == 2
    assert not choose(made).is_stale


@pytest.mark.parametrize("edited", [False, True], ids=["as they were", "edited"])
def test_whoever_edits_a_source_runs_it(edited: bool, tmp_path: Path) -> None:
    """Of a whole package, one of whose extensions cannot even be loaded."""
    copy_into(tmp_path)
    package, name = tmp_path / "pdproxy", f"ids{SUFFIX}"
    (package / name).write_bytes(b"no extension")
    write_stamp(package, Stamp(digest(package), (name,)))
    if edited:
        with (package / "ids.py").open("a") as source:
            source.write("EDITED = 1\n")
    command = [sys.executable, "-c", "from pdproxy.cli import main; import pdproxy.ids as it; print(it.EDITED); main()"]
    command += ["pages", "--pd-buffer-size", "1GiB", "--bytes-per-token", "1024"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if edited:
        assert (said.returncode, said.stdout[:2]) == (0, "1\n"), said.stderr
        assert f"{STALE}, and so the sources run, slower; compile again ({sys.executable} -m" in said.stderr
        assert "--remove" in said.stderr
    else:
        assert "ImportError" in said.stderr, "the extension was not loaded"


def test_a_package_in_a_zip_file_is_imported(tmp_path: Path) -> None:
    """There is no folder to look into, and Python imports no extensions of it."""
    archive = tmp_path / "all.zip"
    with ZipFile(archive, "w") as packed:
        for name in ("__init__.py", "compiled/__init__.py", "compiled/choice.py", "compiled/stamp.py"):
            packed.write(PACKAGE / name, f"pdproxy/{name}")
    told = subprocess.run(
        [sys.executable, "-P", "-c", "import pdproxy; print(pdproxy.__file__, pdproxy.CHOICE.why_plain)"],
        env={**os.environ, "PYTHONPATH": str(archive)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert told.stdout == f"{archive}/pdproxy/__init__.py nobody has compiled it\n", told.stderr


# ── command lines ───────────────────────────────────────────────────────────────────────────────────────────────────


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(words))
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("choice", "told"),
    [(Choice(), "compiled"), (Choice("there was no compiler"), "plain Python: there was no compiler")],
)
def test_the_version_says_what_runs(choice: Choice, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "CHOICE", choice)
    assert run("--version") == (0, f"pdproxy {cli.__version__}, {told}\n")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compile_in_place", lambda: pytest.fail("it compiles"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(command.app, [])
    assert result.exit_code == 2
    assert "pip install 'pdproxy[compile]'" in result.output


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="apt install gcc"):
        build.check_tools()


def test_a_copy_is_complete_and_of_sources_only(tmp_path: Path) -> None:
    copy_into(tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"pdproxy", "transfer"}
    assert digest(tmp_path / "copy" / "pdproxy") == digest()
    assert choose(tmp_path / "copy" / "pdproxy") == Choice("nobody has compiled it")
    with pytest.raises(BuildError, match="is not empty"):
        copy_into(tmp_path / "copy")


def test_into_and_remove_are_two_things(tmp_path: Path) -> None:
    assert CliRunner().invoke(command.app, ["--into", str(tmp_path), "--remove"]).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_this_package_is_what_it_says() -> None:
    assert Path(cli.__file__).parent == PACKAGE
    assert choose() == cli.CHOICE
