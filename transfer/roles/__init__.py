"""The two ends of a transfer: the prefiller's `sender` and the decoder's `receiver`."""
