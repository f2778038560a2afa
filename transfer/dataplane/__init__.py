"""The data plane of a prefiller. Any thread may feed its pushes; a thread or a process of their own carries them
out."""
