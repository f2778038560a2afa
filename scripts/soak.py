#!/usr/bin/env python3
"""Minutes of everything that can go wrong, with real processes: `scripts/soak.py --minutes 10 --seed 1 --json FILE`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("msgspec", "nixl", "rich", "torch", "transformers", "typer", "zmq")


def main() -> None:
    if sys.prefix != str(ROOT / ".venv") and not all(importlib.util.find_spec(name) for name in NEEDED):
        install = str(ROOT / "scripts" / "install")
        os.execv(install, (install, "engine", "--", "python", __file__, *sys.argv[1:]))
    # Of this checkout, here and in every child process.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    from scripts.dev.soak.command import app

    app(prog_name="scripts/soak.py")


if __name__ == "__main__":
    # Until the supervisor takes over there is nothing to stop, and a Ctrl-C needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
