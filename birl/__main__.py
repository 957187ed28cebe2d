"""`python -m birl` is `birl`."""

import sys

from birl.cli import main

if __name__ == "__main__":
    sys.exit(main())
