"""The package measures what the proxy costs, beside others of its kind: CPU per request and per token, latency it adds,
memory."""
