"""Runs `scripts/check_kernel`."""

import sys

from scripts.dev.check_kernel.command import main

if __name__ == "__main__":
    sys.exit(main())
