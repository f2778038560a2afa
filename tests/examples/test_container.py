"""The image's recipe: what it copies is there and is enough, and the proxy runs as the image has it run.

Nothing is built here, which takes minutes and a registry. A proxy whose whole root is read-only, with another user's id
and without capabilities, is started by bubblewrap.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from pdproxy.config.settings import Settings
from scripts.dev.common import debian
from tests.helpers.containerfile import ROOT, context, copied, instructions, is_ignored
from tests.helpers.manifests import overlay, pod_of, proxy_of

PROXY = ROOT / "examples" / "container" / "Containerfile"
ENGINE = ROOT / "examples" / "compose" / "Containerfile.engine"
START_S = 60
BOTH = pytest.mark.parametrize("path", [PROXY, ENGINE], ids=lambda path: path.name)


@BOTH
def test_what_is_copied_is_there(path: Path) -> None:
    ignore = path.with_name(f"{path.name}.dockerignore")
    for source in copied(path):
        assert (ROOT / source).exists(), source
        assert not is_ignored(source, ignore), source
    for name in (
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "pdproxy/x.so",
        "pdproxy/aio/__pycache__/x.pyc",
    ):
        assert is_ignored(name, ignore), name


@BOTH
def test_what_is_copied_is_enough(path: Path, tmp_path: Path) -> None:
    """For the build of the package, and to run it."""
    context(path, tmp_path)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    named = [project["project"]["readme"], *project["project"]["license-files"]]
    named += project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    named.append(f"{project['build-system']['build-backend']}.py")
    assert all((tmp_path / name).exists() for name in named), named
    command = [sys.executable, "-m", "pdproxy", "--version"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("pdproxy ")
    assert "nobody has compiled it" in said.stdout, "what was compiled for this Python came along"
    where = f"import pdproxy.serve as one; assert one.__file__.startswith({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environment, check=True)


@BOTH
def test_extras_are_ours(path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    runs = " ".join(rest for name, rest in instructions(path) if name == "RUN")
    [named] = re.findall(r'"\.\[([\w,]+)\]"', runs)
    assert set(named.split(",")) <= extras.keys()
    assert ("engine" in named) == (path == ENGINE), "the proxy's image has no torch"


def test_the_image_has_what_the_manifests_ask_for() -> None:
    """A store of replicas and the discovery of pods need packages that are extras."""
    runs = " ".join(rest for name, rest in instructions(PROXY) if name == "RUN")
    [named] = re.findall(r'"\.\[([\w,]+)\]"', runs)
    args = pod_of(proxy_of(overlay("discovered")))["spec"]["containers"][0]["args"]
    assert any(one.startswith("--coordinator=redis://") for one in args)
    assert "--discover=kubernetes" in args
    assert set(named.split(",")) >= {"redis", "kubernetes"}


def test_the_image_of_the_proxy_is_compiled() -> None:
    """Or its build fails: a compiler that is missing is no reason for a slow image."""
    [step] = [rest for name, rest in instructions(PROXY) if name == "RUN" and "pip install" in rest]
    assert step.startswith("PDPROXY_COMPILE=1 ")


@BOTH
def test_nobody_is_root(path: Path) -> None:
    [user] = [rest for name, rest in instructions(path) if name == "USER"]
    assert user == "65532:65532"
    assert all(name not in ("HEALTHCHECK", "ADD", "VOLUME") for name, _ in instructions(path))


def test_the_image_and_the_manifests_agree() -> None:
    last = dict(instructions(PROXY))
    context = pod_of(proxy_of(overlay("minimal")))["spec"]
    assert last["USER"] == f"{context['securityContext']['runAsUser']}:{context['securityContext']['runAsGroup']}"
    ports = {str(one["containerPort"]) for one in context["containers"][0]["ports"]}
    assert ports <= set(last["EXPOSE"].split())
    assert str(Settings.model_fields["port"].default) in last["EXPOSE"].split()


# ── read-only, as somebody else ─────────────────────────────────────────────────────────────────────────────────────


def bubblewrap() -> list[str | Path]:
    """The beginning of a command that runs one in a root that nobody can write to, with no rights and another id."""
    try:
        program = debian.program("bubblewrap", "usr/bin/bwrap", "PATH")
    except debian.NotToBeHadError as error:
        pytest.skip(f"NOT TESTED with a read-only root: {error}")
    command: list[str | Path] = [program, "--ro-bind", "/", "/", "--dev", "/dev", "--unshare-user", "--unshare-pid"]
    command += ["--proc", "/proc", "--uid", "65532", "--gid", "65532", "--cap-drop", "ALL", "--die-with-parent"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"NOT TESTED with a read-only root: this machine lets nobody make one: {tried.stderr.strip()}")
    return command


@contextmanager
def enclosed(folder: Path, words: list[str], tmp: list[str]) -> Iterator[str]:
    """A proxy whose whole root is read-only; its address, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "proxy.log"
    engines = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:11", "--drain-grace-s", "0"]
    serve = [sys.executable, "-B", "-m", "pdproxy", "serve", "--port", str(port), *engines, *words]
    with log.open("wb") as output:
        command = [*bubblewrap(), *tmp, "--chdir", str(ROOT), *serve]
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        url, limit = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < limit:
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/health")
                break
            time.sleep(0.05)
        else:
            raise AssertionError(log.read_text()[-3000:])
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "tmp"),
    [([], []), (["--workers", "2"], ["--tmpfs", "/mnt", "--setenv", "TMPDIR", "/mnt"])],
    ids=["nothing to write", "a tmpfs"],
)
def test_it_serves_with_a_read_only_root(tmp_path: Path, words: list[str], tmp: list[str]) -> None:
    with enclosed(tmp_path, words, tmp) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        reply = httpx.get(f"{url}/ready")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_ready_instance")
    assert "Traceback" not in (tmp_path / "proxy.log").read_text()


def test_the_root_is_read_only(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    touch = shutil.which("touch")
    assert touch is not None
    done = subprocess.run([*bubblewrap(), touch, tmp_path / "x"], capture_output=True, text=True, check=False)
    assert "Read-only file system" in done.stderr
