"""A temporary folder that is gone with its process: at its end, or, where the process was killed, at the next start."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".in-use"
"""The file in a folder that its process has locked for as long as it lives. The kernel unlocks it with the process."""


@contextmanager
def work_folder(prefix: str) -> Iterator[Path]:
    """Makes a temporary folder for the block, after it has removed those of the same prefix whose processes are dead.

    A folder that has no lock of this module is left alone.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_dead(left)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        unfinished = Path(name, f"{LOCK}.unfinished")
        with unfinished.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unfinished.rename(Path(name, LOCK))  # only now: nobody finds it before it is locked
            yield Path(name)


def _remove_if_dead(folder: Path) -> None:
    # An error: it has no lock, its process lives, it is another user's, or somebody else removes it.
    with suppress(OSError), Path(folder, LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
