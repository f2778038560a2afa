"""The command ``python -m pdproxy.compiled`` compiles the package that runs it."""

from pdproxy.compiled.command import app

app(prog_name="python -m pdproxy.compiled")
