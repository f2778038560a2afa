"""The engine processes behind the proxy: which there are, which are ready, which is next."""
