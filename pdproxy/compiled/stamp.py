"""A stamp says of which sources a package's extensions were made.

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
APART = frozenset({"launch", "loadtest", "simulate"})
"""Folders from which no compiled module imports anything."""
_NAME = Path("compiled", "stamp.json")


class StaleError(Exception):
    """StaleError says that extensions were made of other sources than those that stand beside them."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Stamp holds the `digest` of the sources, which is empty until all extensions are there, and the extensions'
    `suffix`."""

    digest: str
    suffix: str


def read_stamp(package: Path = PACKAGE) -> Stamp | None:
    """Returns the package's stamp; None where it has no extensions. Raises `StaleError` for a stamp that cannot be
    read."""
    try:
        told = json.loads((package / _NAME).read_bytes())
        return Stamp(told["digest"], told["suffix"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise StaleError(f"{package / _NAME} cannot be read") from None


def write_stamp(package: Path, stamp: Stamp | None) -> None:
    path = package / _NAME
    if stamp is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(json.dumps(asdict(stamp)))


def digest(package: Path = PACKAGE) -> str:
    """Returns the digest of everything that compiled modules are made of: their own sources, and those whose types and
    constants went into them."""
    found = hashlib.sha256()
    for name, path in sorted(_sources(package)):
        found.update(f"\0{name}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def is_compiled(package: Path = PACKAGE) -> bool:
    """Tells whether this Python imports extensions there. Raises `StaleError` where they are not of the sources beside
    them."""
    stamp = read_stamp(package)
    if stamp is None or stamp.suffix != SUFFIX:
        return False
    if stamp.digest != digest(package):
        raise StaleError(f"the compiled modules in {package} are of other sources than those beside them")
    return True


def _sources(package: Path) -> Iterator[tuple[str, Path]]:
    """Yields the sources with their names within the package."""
    for path in package.rglob("*.py"):
        name = path.relative_to(package)
        if name.parts[0] not in APART:
            yield name.as_posix(), path
