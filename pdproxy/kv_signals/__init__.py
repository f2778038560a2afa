"""The package takes what engines tell the proxy about an attempt's KV: granted, ready, failed, released."""
