"""Admission decides which attempt may put KV into a decoder's PD buffer, and when.

It counts pages, keeps those who wait in line, and gives every page back exactly once.
"""
