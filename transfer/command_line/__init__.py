"""The package has what all command lines have in common: help, suggestions, tables, and JSON for programs."""
