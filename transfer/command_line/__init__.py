"""The package has what the command lines of both packages and of the tools share: help, suggestions, tables, and JSON."""
