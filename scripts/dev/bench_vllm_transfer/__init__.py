"""vLLM with two connectors, one after the other, behind the same proxy and with the same questions."""
