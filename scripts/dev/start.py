"""Starts a tool of the folder above: in .venv/, made where it is needed, unless the Python it is started with has all
it takes.

Nothing but the standard library is imported before that is known.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def has_option(*names: str) -> bool:
    """Tells whether one of the options is on the command line, by itself or as ``--name=value``."""
    return any(word.partition("=")[0] in names for word in sys.argv[1:])


def start(script: str, module: str, needed: Sequence[str], extras: Sequence[str]) -> None:
    """Runs the `app` of a module. `needed` are the packages that it takes, and `extras` install them."""
    # Until the run takes over there is nothing to stop, and a Ctrl-C needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.prefix != str(ROOT / ".venv") and not all(importlib.util.find_spec(name) for name in needed):
        install = str(ROOT / "scripts" / "install")
        os.execv(install, (install, *extras, "--", "python", script, *sys.argv[1:]))
    # Of this checkout, here and in every child process.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    importlib.import_module(module).app(prog_name=f"scripts/{Path(script).name}")
