"""HTTP clients towards engines."""
