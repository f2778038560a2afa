"""The package talks to engines: an adapter per kind writes bodies and reads replies, and HTTP clients carry them."""
