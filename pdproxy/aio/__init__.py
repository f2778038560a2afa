"""Time limits, timers and events on asyncio: what is needed between tasks and not there."""
