"""The data plane of a prefiller: pushes that any thread may feed, carried out by a thread or a process of their own."""
