"""Pages: which are free, who holds them, and the registered memory they are cut from."""
