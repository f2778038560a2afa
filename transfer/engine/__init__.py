"""The built-in engine: a prefiller and a decoder on torch and transformers, which stand in for real ones."""
