"""The build of the package: hatchling's, whose wheels have the hot modules compiled where that can be done.

``PDPROXY_COMPILE`` says what to do: ``auto`` (the default) compiles where there is a C compiler, and makes a wheel of
plain Python elsewhere, which says why (``pdproxy --version``); ``1`` fails instead; ``0`` does not compile. Editable
installs are never compiled: their sources are there to be edited.

A plugin such as hatch-mypyc compiles in the checkout and has neither a stamp nor a way without.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

# Where hatchling sees pip at work, it has it build a whole wheel to learn its metadata, which hooks might change. This
# one does not, and pip need not compile what it only looks at.
os.environ.pop("PIP_BUILD_TRACKER", None)

from hatchling import build as hatchling
from hatchling.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

from pdproxy.compiled.build import BuildError, check_compiler, compile_in_place, copy_into
from pdproxy.compiled.stamp import STAMP, Stamp, extensions, write_stamp

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
VARIABLE = "PDPROXY_COMPILE"


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Returns what is to be installed before the build. The tools are not among it where nothing will be compiled: pip
    may be unable to get them there. Editable installs have a function of their own, and need no tools."""
    needed = hatchling.get_requires_for_build_wheel(config_settings)
    try:
        _check()
    except BuildError:
        return needed
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return [*needed, *project["optional-dependencies"]["compile"]]


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """CompileHook puts extensions into the wheel, and a stamp that says of what they were made, or why there are
    none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises `BuildError` where it must compile and cannot."""
        if version == "editable":
            return
        self._work = tempfile.TemporaryDirectory(prefix="pdproxy-wheel-")
        package = Path(self._work.name, "pdproxy")
        copy_into(package.parent)
        try:
            _check()
            compile_in_place(package)
        except BuildError as error:
            if _mode() == "1":
                raise
            self.app.display_warning(f"This wheel is plain Python: {error}")
            write_stamp(package, Stamp(why_plain=str(error).partition("\n")[0]))
        else:
            build_data["pure_python"], build_data["infer_tag"] = False, True
        for name in (*extensions(package), STAMP.as_posix()):
            build_data["force_include"][str(package / name)] = f"pdproxy/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._work.cleanup()


def _check() -> None:
    """Raises `BuildError` where nothing is to be compiled, or nothing can be."""
    if _mode() == "0":
        raise BuildError(f"it was built with {VARIABLE}=0")
    check_compiler()


def _mode() -> str:
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in ("auto", "0", "1"):
        raise ValueError(f"{VARIABLE} is {mode!r}; it can be auto, 0 or 1")
    return mode
