"""The fleet is the engine processes behind the proxy: it knows which there are, which are ready, which is next."""
