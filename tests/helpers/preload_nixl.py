"""Importing this loads NIXL and, where it is found, its UCX plugin: half a second of work for the linker."""

from __future__ import annotations

import ctypes
from pathlib import Path

from transfer.agents.nixl_setup import load_api

package = Path(str(load_api().__file__)).parent
for plugin in package.parent.glob(f"{package.name}.libs/nixl/libplugin_UCX.so"):
    ctypes.CDLL(str(plugin))
