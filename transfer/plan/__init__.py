"""The plan of a transfer: which blocks travel, which bytes of a page, and which heads to which rank. It is pure:
numbers only."""
