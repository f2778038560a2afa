"""The package holds the HTTP clients that call engines."""
