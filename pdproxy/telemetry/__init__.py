"""The telemetry package makes visible from outside what the proxy does: metrics and one log line per request."""
