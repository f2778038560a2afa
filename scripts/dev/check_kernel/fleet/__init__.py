"""The search with several fronts, leaders that follow one another, and the messages between them, on the real code."""
