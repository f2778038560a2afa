"""The package holds the options: what an operator writes, checked."""
