"""KV custody and the NIXL transfer between a prefiller and a decoder.

Importing this package imports neither torch nor NIXL; the modules that need them say so.
"""
