"""The package makes visible from outside what the proxy does: records of requests, and logs, metrics and spans."""
