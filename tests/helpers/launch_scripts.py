"""What the scripts of examples say to `scripts/launch_xpyd.sh`, with one in its place that only prints it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRINTS = '#!/bin/sh\nprintf "%s\\0" "$#" "$@"\nenv -0\n'
OWN = ("VLLM_", "LMCACHE_")
"""Variables that scripts give to engines."""


def said_by(script: Path, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The launcher's command line and environment, when the script is run with these words."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / script.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(script, copy)
        launcher = Path(folder) / "scripts/launch_xpyd.sh"
        launcher.parent.mkdir()
        launcher.write_text(PRINTS)
        launcher.chmod(0o755)
        env = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
        run = subprocess.run([copy, *words], stdout=subprocess.PIPE, text=True, check=True, env=env)
    number, *rest = run.stdout.split("\0")[:-1]
    return rest[: int(number)], dict(line.split("=", 1) for line in rest[int(number) :])
