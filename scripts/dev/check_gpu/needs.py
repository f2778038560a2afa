"""Finds out which packages are missing, for all steps and for each of them. Installs nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

COMMAND_LINE = ("typer", "rich")
"""The packages without which options cannot be read."""
TRANSFER = ("torch", "nixl", "numpy", "msgspec", "zmq", "rich")
"""The packages without which nothing can be checked."""
TESTS = ("pytest",)
PROCESS_TESTS = ("pytest", "httpx", "pydantic_settings")
CONNECTOR = (*PROCESS_TESTS, "fastapi", "uvicorn", "httptools")
ENGINE = ("transformers", "tokenizers", "safetensors", "pydantic_settings", "typer", "jinja2")
_PACKAGES = {"zmq": "pyzmq", "pydantic_settings": "pydantic-settings", "nixl": "'nixl>=1.3,<2'"}


def missing(modules: Iterable[str]) -> list[str]:
    """Returns the packages that would have to be installed, as pip knows them."""
    return [_PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None]
