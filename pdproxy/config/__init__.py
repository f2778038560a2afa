"""The options: what an operator writes, checked."""
