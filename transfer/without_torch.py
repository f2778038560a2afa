"""A process that reads models' configs and computes nothing does without torch, also where torch is installed."""

from __future__ import annotations

import os
import sys


def leave_torch_out() -> None:
    """Makes this process one in which there is no torch: ``import torch`` raises `ImportError` from now on.

    Where transformers finds torch, it loads all of it to read a config: that takes seconds, and 250 MB that stay. Does
    nothing where torch has been loaded.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the import system's own sign of what is not there
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that there is no torch
