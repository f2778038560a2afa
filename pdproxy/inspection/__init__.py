"""The package tells what a fleet is like: ``pdproxy check`` tries it, and ``pdproxy status`` asks a running proxy."""
