"""The entry point runs `scripts/check_transfer`."""

import sys

from scripts.dev.check_transfer.command import main

if __name__ == "__main__":
    sys.exit(main())
