"""The proxy's hot modules may run as C extensions: mypyc makes them from the sources that stand beside them."""
