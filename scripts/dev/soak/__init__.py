"""A soak with real processes: many clients, random faults, and at the end nothing wrong, hung, held or leaked."""
