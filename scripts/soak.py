#!/usr/bin/env python3
"""Minutes of everything that can go wrong, with real processes: `scripts/soak.py --minutes 10 --seed 1 --json FILE`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes.
"""

from dev.start import start

if __name__ == "__main__":
    start(
        __file__,
        "scripts.dev.soak.command",
        ("msgspec", "nixl", "rich", "torch", "transformers", "typer", "zmq"),
        ("engine",),
    )
