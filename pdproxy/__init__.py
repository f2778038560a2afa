"""Prefill/decode proxy and orchestrator: one OpenAI-compatible address in front of x prefillers and y decoders."""

__version__ = "0.1.0"
