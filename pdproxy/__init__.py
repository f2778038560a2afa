"""Prefill/decode proxy and orchestrator: one OpenAI-compatible address in front of x prefillers and y decoders."""

from pdproxy.compiled.choice import choose, ignore_extensions

__version__ = "0.1.0"

CHOICE = choose()
"""The way in which the hot modules run, as extensions or as sources, and why."""
if CHOICE.is_stale:
    ignore_extensions()
