"""Ends of the transfer inside other people's engines, loaded by them as plug-ins."""
