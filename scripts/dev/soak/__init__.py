"""The package is a soak with real processes: there are many clients and random faults, and at the end nothing may be
wrong, hung, held or leaked."""
