"""The proxy's hot modules as C extensions: made by mypyc from the sources that stand beside them, or not at all."""
