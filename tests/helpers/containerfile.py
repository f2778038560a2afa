"""A Containerfile as its builder reads it, as far as ours go: instructions, and what of the checkout they are given."""

from __future__ import annotations

import shlex
import shutil
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


def instructions(path: Path) -> list[tuple[str, str]]:
    """Each instruction with its words, comments left out and continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined if line.strip())]


def copied(path: Path) -> list[str]:
    """What is copied out of the checkout."""
    words = [shlex.split(rest) for name, rest in instructions(path) if name == "COPY"]
    return [source for one in words if not one[0].startswith("--from=") for source in one[:-1]]


def is_ignored(name: str, ignore: Path) -> bool:
    """Whether the builder is not given this file, by its path in the checkout. The last line that fits decides."""
    verdict = False
    parts = Path(name).parts
    for line in ignore.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        if line.lstrip("!").startswith("**/"):
            fits = any(fnmatch(part, pattern) for part in parts)
        else:
            fits = any(fnmatch("/".join(parts[: end + 1]), pattern) for end in range(len(parts)))
        if fits:
            verdict = not line.startswith("!")
    return verdict


def context(path: Path, folder: Path) -> None:
    """Puts into `folder` what the file copies, less what its ignore file leaves out."""
    ignore = path.with_name(f"{path.name}.dockerignore")
    for source in copied(path):
        start = ROOT / source
        for one in [start] if start.is_file() else sorted(start.rglob("*")):
            name = one.relative_to(ROOT)
            if one.is_file() and not is_ignored(str(name), ignore):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(one, folder / name)
