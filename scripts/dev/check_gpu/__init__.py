"""Checks whether the KV transfer keeps its promises on a GPU: what `scripts/check_gpu` runs."""
