"""The package takes what decoders tell the proxy about an attempt's KV: ready, failed, released."""
