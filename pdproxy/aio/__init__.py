"""The package holds time limits, timers and events which asyncio does not have and which tasks need between them."""
