"""Data movers: one protocol (`base`), and NIXL behind it (`nixl`)."""
