#!/usr/bin/env python3
"""Measures vLLM with pdproxy's own connector beside vLLM with its NixlConnector, on a CPU:
`scripts/bench_vllm_transfer.py --json FILE`.

Runs in .venv/, made where it is needed, unless the Python it is started with has all it takes. vLLM gets an environment
of its own, as for scripts/test_vllm.
"""

from dev.start import start

NEEDED = ("httpx", "rich", "torch", "transformers", "typer", "uvicorn")

if __name__ == "__main__":
    start(__file__, "scripts.dev.bench_vllm_transfer.command", NEEDED, ("engine", "demo"))
