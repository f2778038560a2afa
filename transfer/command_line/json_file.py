"""The module writes what a command found as one JSON document, where its ``--json`` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

STDOUT = Path("-")
"""The file that stands for stdout. It is also what ``--json`` means without a file."""


def write_json(path: Path | None, document: Any, *, indent: int = 2) -> None:
    """Writes the document, where somebody wants it. Raises `OSError`."""
    if path is None:
        return
    text = json.dumps(document, indent=indent) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        path.write_text(text)


def console_beside(path: Path | None) -> Console:
    """Returns the console for what people read: stdout, unless that is for the JSON document."""
    return Console(stderr=path == STDOUT)
