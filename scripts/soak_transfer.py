#!/usr/bin/env python3
"""Sixteen prefillers into one decoder, its buffer always full: `scripts/soak_transfer.py --minutes 10 --json FILE`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes.
"""

from dev.start import start

if __name__ == "__main__":
    start(
        __file__,
        "scripts.dev.soak_transfer.command",
        ("msgspec", "nixl", "numpy", "rich", "torch", "typer", "zmq"),
        ("engine",),
    )
