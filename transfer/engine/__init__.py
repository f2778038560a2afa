"""The built-in engine: a prefiller and a decoder on torch and transformers that stand in for real ones."""
