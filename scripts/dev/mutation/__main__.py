"""The command ``python -m mutation`` changes source files in small ways, and tells which changes no test notices."""

import sys

from mutation.command import main

if __name__ == "__main__":
    sys.exit(main())
