#!/usr/bin/env python3
"""Measures what the proxy costs, beside others of its kind: `scripts/bench_proxy.py --peers vllm-router,smg --json
FILE`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes. Peers are commands that
are installed already. Two helpers are compiled: it takes a C compiler.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("fastapi", "httpx", "msgspec", "rich", "tokenizers", "typer", "uvicorn", "uvloop", "zmq")
PICTURE = ("matplotlib",)


def main() -> None:
    is_drawing = any(word.partition("=")[0] == "--plot" for word in sys.argv[1:])
    needed = NEEDED + (PICTURE if is_drawing else ())
    if sys.prefix != str(ROOT / ".venv") and not all(importlib.util.find_spec(name) for name in needed):
        install = str(ROOT / "scripts" / "install")
        os.execv(install, (install, *(("bench",) if is_drawing else ()), "--", "python", __file__, *sys.argv[1:]))
    # Of this checkout, here and in every child process.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    from scripts.dev.bench_proxy.command import app

    app(prog_name="scripts/bench_proxy.py")


if __name__ == "__main__":
    # Until the run takes over there is nothing to stop, and a Ctrl-C needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
