"""The soak of `scripts/soak_transfer.py` has many prefillers, one decoder, a buffer that is always full, and nobody who
admits."""
