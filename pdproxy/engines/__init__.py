"""Talking to engines: what is written, read and sent."""
