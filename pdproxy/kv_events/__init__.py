"""The package takes what engines say of their prefix caches, and keeps an index of what is in them."""
