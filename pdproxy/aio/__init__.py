"""The package holds time limits, timers and events between tasks, which asyncio itself does not have."""
