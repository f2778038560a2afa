"""The module reads LMCache's own configuration, as its users write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pdproxy.launch.errors import PreflightError


def read_lmcache_file(path: Path, option: str) -> Mapping[str, object]:
    """Returns the options in the file. Raises `PreflightError`, which names the option that has named the file."""
    import yaml  # type: ignore[import-untyped]

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PreflightError(f"{option}: {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise PreflightError(f"{option}: {path} is not a mapping of options")
    return value
