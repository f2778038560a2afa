"""What travels and where to: which blocks, which bytes of a page, which heads to which rank. Pure; numbers only."""
