"""Who may put KV into a decoder's PD buffer, and when: pages counted, waiters in line, every page given back once."""
