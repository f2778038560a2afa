"""The package lets replicas agree on who leads: a store that all of them reach, and the election over it."""
