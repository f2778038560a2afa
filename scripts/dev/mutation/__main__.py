import sys

from mutation.command import main

if __name__ == "__main__":
    sys.exit(main())
