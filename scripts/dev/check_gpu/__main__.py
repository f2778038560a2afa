"""Runs `scripts/check_gpu`."""

import sys

from scripts.dev.check_gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
