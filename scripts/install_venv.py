"""Makes `.venv` and keeps it up to date, and does nothing, quickly, when it already is.

usage: scripts/install [EXTRA...] [-- COMMAND [ARGUMENT...]]

EXTRA is one of the extras in pyproject.toml (default: engine demo). They add up: what an earlier run brought
stays. Releases are held to constraints.txt. pip's own environment variables are honoured, so an index of your
own can say which build of torch you get. COMMAND, where given, replaces this process afterwards and finds
`.venv/bin` first on its PATH. The variable PYTHON names the interpreter to make `.venv` with.

Safe to run twice at once (the second waits) and after an interrupted run (what it left is made anew).
Uses the standard library alone, because nothing else is there yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_EXTRAS = ("engine", "demo")
STAMP, LOCK, LOG = "pdproxy-install.json", "pdproxy-install.lock", "pdproxy-install.log"
COMPILE_LOG = "pdproxy-compile.log"
# What a finished installation takes, with room for pip's own copies while it works.
ENGINE_DISK_BYTES, BASE_DISK_BYTES = 4 << 30, 1 << 30


class InstallError(Exception):
    """The installation cannot go on. The user is told the message, as one line."""


@dataclass(frozen=True)
class Stamp:
    """A `Stamp` holds what `.venv` was made from. `is_done` is False from before the first change until after the
    last."""

    root: str
    python: str
    fingerprint: str
    extras: list[str]
    made_here: bool
    is_done: bool


def main(arguments: list[str]) -> int:
    before, _, command = _split(arguments)
    if "-h" in before or "--help" in before:
        say((__doc__ or "").partition("usage: ")[2], prefix="usage: ")
        return 0
    try:
        bring_up_to_date(ROOT, set(before) or set(DEFAULT_EXTRAS))
    except InstallError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts over")
        return 130
    if command:
        become(ROOT / ".venv", command)
    return 0


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    if "--" not in arguments:
        return arguments, "", []
    at = arguments.index("--")
    return arguments[:at], "--", arguments[at + 1 :]


def become(venv: Path, command: list[str]) -> NoReturn:
    """Replaces this process with the command. Every signal meant for this process then reaches the command."""
    os.environ["VIRTUAL_ENV"] = str(venv)
    os.environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.execvp(command[0], command)


# ── what is to be done ──────────────────────────────────────────────────────────────────────────────────────


def bring_up_to_date(root: Path, extras: set[str]) -> None:
    """Makes sure that `.venv` holds the package, editable, with at least these extras. Raises `InstallError`."""
    check_extras(root, extras)
    if is_up_to_date(root, extras):
        say(f".venv is up to date ({', '.join(read_stamp(root / '.venv').extras)})")
        return
    with locked(root / ".venv"):
        if not is_up_to_date(root, extras):
            install(root, extras)


def check_extras(root: Path, extras: set[str]) -> None:
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if unknown := sorted(extras - set(known)):
        raise InstallError(f"no extra named {unknown[0]!r}; there are: {', '.join(known)}")


def is_up_to_date(root: Path, extras: set[str]) -> bool:
    stamp = read_stamp(root / ".venv")
    return (
        stamp.is_done
        and is_same_place(stamp, root)
        and stamp.fingerprint == fingerprint(root)
        and extras <= set(stamp.extras)
    )


def is_same_place(stamp: Stamp, root: Path) -> bool:
    """Returns False where the folder was moved or its Python replaced: an environment names both by absolute path."""
    return stamp.root == str(root) and stamp.python == python_version(root / ".venv")


def fingerprint(root: Path) -> str:
    files = (root / "pyproject.toml", root / "constraints.txt")
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def read_stamp(venv: Path) -> Stamp:
    """Returns the stamp of an environment; an empty one where there is none, or none that can be read."""
    try:
        return Stamp(**json.loads((venv / STAMP).read_text()))
    except (OSError, ValueError, TypeError):
        return Stamp(root="", python="", fingerprint="", extras=[], made_here=False, is_done=False)


def write_stamp(venv: Path, stamp: Stamp) -> None:
    part = venv / f"{STAMP}.part"
    part.write_text(json.dumps(asdict(stamp), indent=1) + "\n")
    part.replace(venv / STAMP)


def python_version(venv: Path) -> str:
    """Returns the version of the environment's own interpreter, by running it; empty where it does not run."""
    program = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    command = [str(venv / "bin" / "python"), "-I", "-c", program]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@contextmanager
def locked(venv: Path) -> Iterator[None]:
    """Returns a context manager that lets in one process at a time. pip inherits the lock, so that it is held even
    while only an orphaned pip is left.
    """
    try:
        venv.mkdir(exist_ok=True)
        lock = os.open(venv / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InstallError(f"cannot write to {venv}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another installation is at work here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock, True)
        yield
    finally:
        os.close(lock)


# ── doing it ────────────────────────────────────────────────────────────────────────────────────────────────


def install(root: Path, extras: set[str]) -> None:
    """Brings the environment up to date; call it with the lock held. An environment that somebody else made is added
    to, never emptied.
    """
    venv, started = root / ".venv", time.monotonic()
    old = read_stamp(venv)
    check_disk(root, extras)
    # A foreign environment has a pyvenv.cfg and no stamp of ours.
    made_here = old.made_here or not (venv / "pyvenv.cfg").exists()
    if made_here and not (old.is_done and is_same_place(old, root)):
        empty(venv)
    stamp = Stamp(
        root=str(root),
        python="",
        fingerprint=fingerprint(root),
        extras=sorted(extras | set(old.extras)),
        made_here=made_here,
        is_done=False,
    )
    try:
        write_stamp(venv, stamp)
        make_environment(venv)
        install_package(root, stamp.extras)
        compile_packages(venv)
        write_stamp(venv, Stamp(**{**asdict(stamp), "python": python_version(venv), "is_done": True}))
    except OSError as error:
        raise InstallError(f"cannot write to {venv}: {error.strerror}") from error
    say(f".venv is ready ({', '.join(stamp.extras)}) after {time.monotonic() - started:.0f} s")


def check_disk(root: Path, extras: set[str]) -> None:
    needed, free = ENGINE_DISK_BYTES if "engine" in extras else BASE_DISK_BYTES, shutil.disk_usage(root).free
    if free < needed:
        raise InstallError(f"{root} has {free / 2**30:.1f} GiB of disk left, and this needs {needed / 2**30:.0f} GiB")


def empty(venv: Path) -> None:
    """Removes all but the lock. The stamp goes last, so that a folder that is half empty is still known for what it
    is."""
    for entry in venv.iterdir():
        if entry.name in (LOCK, STAMP):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (venv / STAMP).unlink(missing_ok=True)


def make_environment(venv: Path) -> None:
    """Makes the environment, also where one is there but has no pip."""
    if (venv / "bin" / "python").exists() and any(venv.glob("lib/python*/site-packages/pip")):
        return
    say("making .venv")
    run([sys.executable, "-I", "-m", "venv", venv], venv / LOG, Progress("making .venv"))


def install_package(root: Path, extras: list[str]) -> None:
    venv = root / ".venv"
    say(f"installing the package with {', '.join(extras)}; the first time takes a minute or more")
    pip: list[str | Path] = [
        venv / "bin" / "python",
        "-I",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
    ]
    pip += ["--no-compile", "--progress-bar", "off", "--constraint", root / "constraints.txt"]
    run([*pip, "--editable", f"{root}[{','.join(extras)}]"], venv / LOG, Progress("starting pip"))


def compile_packages(venv: Path) -> None:
    """Compiles the packages on all cores, where pip would use one. A file that does not compile (a template, say) is no
    failure.
    """
    folders = venv.glob("lib/python*/site-packages")
    compileall: list[str | Path] = [venv / "bin" / "python", "-I", "-m", "compileall", "-qq", "-j", "0"]
    with suppress(InstallError):
        run([*compileall, *folders], venv / COMPILE_LOG, Progress("compiling what was installed"))


def run(command: list[str | Path], log: Path, progress: Progress) -> None:
    """Runs a command to its end, with its output in `log`. Ends it where this process is told to end. Raises
    `InstallError` where it fails.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, close_fds=False)
        try:
            assert process.stdout is not None
            with process.stdout:
                follow(process.stdout, file, progress)
            status = process.wait()
        finally:
            progress.finish()
            stop(process)
    if status:
        raise InstallError(f"{failure_in(log)}; all of the output is in {log}")


def follow(output: IO[bytes], file: IO[bytes], progress: Progress) -> None:
    rest = b""
    while True:
        if not select.select([output], [], [], 1.0)[0]:
            progress.tick()
            continue
        block = os.read(output.fileno(), 65536)
        if not block:
            return
        file.write(block)
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            progress.see(line.decode(errors="replace"))
        progress.tick()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the process to end, and kills it where it does not. Nothing is left of it afterwards."""
    if process.poll() is not None:
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()


def failure_in(log: Path) -> str:
    """Returns the line that says why, out of everything that was printed."""
    lines = log.read_text(errors="replace").splitlines()
    if any("No space left on device" in line for line in lines):
        return "no disk space left"
    errors = [line.strip() for line in lines if line.strip().lower().startswith("error")]
    return (errors or [line.strip() for line in lines if line.strip()] or ["it failed without a word"])[0]


class Progress:
    """A `Progress` is one line that tells what is going on and for how long: redrawn on a terminal, repeated
    elsewhere."""

    def __init__(self, step: str) -> None:
        self.step = step
        self._is_terminal = sys.stderr.isatty()
        self._started = self._shown = time.monotonic()

    def see(self, line: str) -> None:
        """Takes a line of output, and reads the step from it where the line is one of pip's."""
        words = line.split()
        if line.startswith("Collecting "):
            self.step = f"collecting {words[1]}"
        elif words[:1] in (["Downloading"], ["Using"], ["Processing"]):
            name = next((word.rsplit("/")[-1] for word in words if word.endswith((".whl", ".gz"))), "")
            size = re.search(r"\([\d.]+ .?B\)", line)
            self.step = f"{words[0].lower()} {name} {size.group() if size else ''}".rstrip() if name else self.step
        elif line.startswith("Installing collected packages"):
            self.step = f"installing {len(words) - 3} packages"

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._shown < (0.2 if self._is_terminal else 5):
            return
        self._shown = now
        text = f"{self.step} … {now - self._started:.0f} s"
        if self._is_terminal:
            sys.stderr.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()
        else:
            say(text)

    def finish(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def say(text: str, prefix: str = "install: ") -> None:
    sys.stderr.write(f"{prefix}{text.rstrip()}\n")
    sys.stderr.flush()


def _interrupt(_signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main(sys.argv[1:]))
