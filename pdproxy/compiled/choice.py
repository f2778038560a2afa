"""The choice between extensions and sources is made before any other module of the package is imported.

Extensions that were made of other sources than those beside them are not imported. So whoever edits a source runs what
was written, and whoever updates a package runs the new one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import PathEntryFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path

from pdproxy.compiled.stamp import PACKAGE, digest, extensions, read_stamp

STALE = "the compiled modules are of other sources than those beside them"


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice tells in words for a user why the sources run; None: the extensions do. With `is_stale`, there are
    extensions that must not be imported."""

    why_plain: str | None = None
    is_stale: bool = False


def choose(package: Path = PACKAGE) -> Choice:
    """Returns which of the two this Python has to run in `package`."""
    stamp, found = read_stamp(package), extensions(package)
    if found:
        is_stale = found != stamp.extensions or stamp.digest != digest(package)
        return Choice(STALE, is_stale=True) if is_stale else Choice()
    if stamp.extensions:
        return Choice("it is compiled for another Python")
    return Choice(stamp.why_plain or "nobody has compiled it")


def ignore_extensions(package: Path = PACKAGE) -> None:
    """Has Python import the sources of `package`, whatever extensions lie beside them."""
    find: Callable[[str], PathEntryFinder] = FileFinder.path_hook((SourceFileLoader, SOURCE_SUFFIXES))

    def sources_only(path: str) -> PathEntryFinder:
        if not Path(path).resolve().is_relative_to(package):
            raise ImportError(f"{path} is none of the package's folders")
        return find(path)

    sys.path_hooks.insert(0, sources_only)
    # These have been looked through already, for extensions as well.
    sys.path_importer_cache.clear()
