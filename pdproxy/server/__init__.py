"""The server is the side of the proxy that its clients see: their connections, and each request's exchange on one of
them."""
