"""Runs `scripts/check_kernel`."""

import logging
import sys

from scripts.dev.check_kernel.command import main

if __name__ == "__main__":
    logging.getLogger("pdproxy").setLevel(logging.ERROR)  # leases that are waited for are no news here
    sys.exit(main())
