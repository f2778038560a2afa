"""What the command lines of both packages and of the tools share: help, suggestions, tables, and JSON for programs."""
