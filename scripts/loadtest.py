#!/usr/bin/env python3
"""Load tests that know of prefill and decode: `scripts/loadtest.py run http://localhost:9100 --rate 8`.

It is `pdproxy loadtest`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("fastapi", "httptools", "httpx", "msgspec", "rich", "typer", "uvicorn")
ENGINES = ("nixl", "torch", "transformers", "zmq")


def main() -> None:
    has_house = any(word.partition("=")[0] == "--house" for word in sys.argv[1:])
    needed = NEEDED + (ENGINES if has_house else ())
    if sys.prefix != str(ROOT / ".venv") and not all(importlib.util.find_spec(name) for name in needed):
        install, extra = str(ROOT / "scripts" / "install"), "engine" if has_house else "demo"
        os.execv(install, (install, extra, "--", "python", __file__, *sys.argv[1:]))
    # Of this checkout, here and in every child process.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    from pdproxy.loadtest.command import app

    app(prog_name="scripts/loadtest.py")


if __name__ == "__main__":
    # Until the run takes over there is nothing to stop, and a Ctrl-C needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
