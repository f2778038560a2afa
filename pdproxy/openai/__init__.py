"""What the client asked for: the body read, measured, and sent on its way. No engine is asked anything."""
