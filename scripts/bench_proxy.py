#!/usr/bin/env python3
"""Measures what the proxy costs, beside others of its kind: `scripts/bench_proxy.py --peers vllm-router,smg --json
FILE`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes. Peers are commands that
are installed already. Two helpers are compiled: it takes a C compiler.
"""

from dev.start import has_option, start

NEEDED = ("fastapi", "httpx", "msgspec", "rich", "tokenizers", "typer", "uvicorn", "uvloop", "zmq")

if __name__ == "__main__":
    picture = has_option("--plot")
    start(
        __file__,
        "scripts.dev.bench_proxy.command",
        (*NEEDED, *(["matplotlib"] if picture else [])),
        ["bench"] if picture else [],
    )
