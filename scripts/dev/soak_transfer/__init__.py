"""Many prefillers, one decoder, a buffer that is always full, and nobody who admits: `scripts/soak_transfer.py`."""
