"""The fleet is the engine processes behind the proxy. The package knows which there are, and which are ready."""
