"""What decoders tell the proxy about an attempt's KV: ready, failed, released."""
