"""Data movers: one protocol (`base`), NIXL behind it (`nixl`)."""
