#!/usr/bin/env python3
"""Measures how fast KV travels on this machine, beside bare NIXL and a plain copy: `scripts/bench_transfer.py --json
FILE`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes.
"""

from dev.start import has_option, start

NEEDED = ("msgspec", "nixl", "numpy", "rich", "torch", "typer", "zmq")

if __name__ == "__main__":
    picture = ["matplotlib"] if has_option("--plot") else []
    engines = ["transformers"] if has_option("--conversation") else []
    start(__file__, "scripts.dev.bench_transfer.command", (*NEEDED, *picture, *engines), ("engine", "bench"))
