"""The command ``python -m pdproxy.compiled.extensions FOLDER`` runs mypyc and the C compiler.

Run it in the folder that has the sources.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mypyc.build import mypycify
from setuptools import Distribution

from pdproxy.compiled.modules import MODULES

SHARED = "pdproxy.compiled.all"
"""The library that has the code of all modules. The extension of each module is a few lines, and calls between modules
cost nothing."""

LINUX_FLAGS = ["-fno-plt", "-fvisibility=hidden"]
"""Calls within the library, and into Python's own, take no way round by tables that are there for libraries which are
put together at run time."""

OPTIONS = """\
[mypy]
ignore_missing_imports = True
# Of everything else nothing is known: to read it takes a minute, and depends on what is installed.
follow_imports = skip
[mypy-pdproxy.*,msgspec.*]
follow_imports = silent
"""


def make(into: Path) -> None:
    """Compiles the modules into the folder `into`. Where one does not compile, it says why and ends the process."""
    options = Path("mypy.ini")
    options.write_text(OPTIONS)
    extensions = mypycify(
        ["--config-file", str(options), "--cache-dir", "mypy", *(_path(name) for name in MODULES)],
        opt_level="2",
        debug_level="0",
        target_dir="c",
        group_name=SHARED,
    )
    if sys.platform == "linux":
        for extension in extensions:
            extension.extra_compile_args += LINUX_FLAGS
    command = Distribution({"name": "pdproxy", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib = str(into)
    command.build_temp = "objects"
    command.ensure_finalized()
    command.run()


def _path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


if __name__ == "__main__":
    make(Path(sys.argv[1]))
