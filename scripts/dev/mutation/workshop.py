"""Copies of the tree, in which files are changed and tests run. The checkout itself is never written to."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SKIPPED = frozenset({".git", ".venv", "__pycache__", "node_modules", "build", "dist"})


def files_of(root: Path) -> list[Path]:
    """Returns all files that belong to the tree, relative to `root`: what git knows or would add; without git, what is
    there besides caches."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    listed = subprocess.run(command, capture_output=True, check=False)
    if listed.returncode == 0:
        names = [Path(os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name]
        return sorted(name for name in names if (root / name).is_file())
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(path for path in found if not SKIPPED & set(path.parts) and path.parts[0][0] != ".")


def digest(root: Path, *also: str) -> str:
    """Returns a digest that changes with every file of the tree, and with `also`."""
    summed = hashlib.sha256("\0".join(also).encode())
    for name in files_of(root):
        summed.update(f"\0{name}\0".encode())
        summed.update(hashlib.sha256((root / name).read_bytes()).digest())
    return summed.hexdigest()[:24]


class Workshop:
    """A `Workshop` is one copy of the tree. Mutable state: its files, and a count of the changes."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        for name in files_of(root):
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy)
        self._num_written = 0

    @contextmanager
    def changed(self, path: str, text: bytes) -> Iterator[None]:
        """Gives `path` another text while the block lasts."""
        file = self.folder / path
        original = file.read_bytes()
        self._write(file, text)
        try:
            yield
        finally:
            self._write(file, original)

    def _write(self, file: Path, text: bytes) -> None:
        """Writes the file, and gives it a time of its own: Python takes bytecode for up to date by a file's size and
        second."""
        file.write_bytes(text)
        self._num_written += 1
        seconds = 1_000_000_000 + self._num_written
        os.utime(file, (seconds, seconds))


@contextmanager
def workshops(root: Path, number: int) -> Iterator[list[Workshop]]:
    """Makes `number` copies of the tree, which are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder).resolve()
        yield [Workshop(place / str(index), root) for index in range(number)]
