#!/usr/bin/env python3
"""Load tests that know of prefill and decode: `scripts/loadtest.py run http://localhost:9100 --rate 8`.

It is `pdproxy loadtest`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes.
"""

from dev.start import has_option, start

NEEDED = ("fastapi", "httptools", "httpx", "msgspec", "rich", "typer", "uvicorn")
ENGINES = ("nixl", "torch", "transformers", "zmq")

if __name__ == "__main__":
    has_cluster = has_option("--cluster", "--house")
    start(
        __file__,
        "pdproxy.loadtest.command",
        (*NEEDED, *(ENGINES if has_cluster else ())),
        ["engine" if has_cluster else "demo"],
    )
