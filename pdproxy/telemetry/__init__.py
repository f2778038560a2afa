"""What can be seen from outside: metrics and one log line per request."""
