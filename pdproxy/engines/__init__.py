"""The package talks to engines: it says what is written, read and sent."""
