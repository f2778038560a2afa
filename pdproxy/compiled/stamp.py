"""A stamp lies in a package and says what its extensions were made of, or why there are none.

Python imports an extension instead of its source, without a look at it. So after an edit or an update of the source,
the old code would go on running.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package that runs."""
SUFFIX = EXTENSION_SUFFIXES[0]
"""The suffix of extensions that this Python imports. It does not import those of another Python."""
STAMP = Path("compiled", "stamp.json")
"""The stamp's place in a package."""
APART = frozenset({"launch", "loadtest", "simulate"})
"""Folders from which no compiled module imports anything."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Stamp holds the names of the extensions within the package, and the `digest` of the sources that they were made
    of. Of a package that was built without any it says `why_plain`, in words for a user."""

    digest: str = ""
    extensions: tuple[str, ...] = ()
    why_plain: str = ""


def read_stamp(package: Path = PACKAGE) -> Stamp:
    """Returns the package's stamp; an empty one, which fits no extensions, where there is none that can be read."""
    try:
        told = json.loads((package / STAMP).read_bytes())
        return Stamp(told["digest"], tuple(told["extensions"]), told["why_plain"])
    except (OSError, ValueError, TypeError, KeyError):  # OSError: there is none, or the package is in a zip file
        return Stamp()


def write_stamp(package: Path, stamp: Stamp) -> None:
    (package / STAMP).write_text(json.dumps(asdict(stamp)))


def digest(package: Path = PACKAGE) -> str:
    """Returns the digest of everything that compiled modules are made of: their own sources, and those whose types and
    constants went into them."""
    found = hashlib.sha256()
    for name, path in sorted(_sources(package)):
        found.update(f"\0{name}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def extensions(package: Path = PACKAGE) -> tuple[str, ...]:
    """Returns the names, within the package, of the extensions that this Python would import."""
    return tuple(sorted(path.relative_to(package).as_posix() for path in package.rglob(f"*{SUFFIX}")))


def _sources(package: Path) -> Iterator[tuple[str, Path]]:
    """Yields the sources with their names within the package."""
    for path in package.rglob("*.py"):
        name = path.relative_to(package)
        if name.parts[0] not in APART:
            yield name.as_posix(), path
