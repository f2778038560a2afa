"""The package speaks HTTP/1.1 in clear text to one engine, at a few microseconds per call. It carries the legs
wherever that is enough.
"""
