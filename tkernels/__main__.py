"""`python -m tkernels` is the command `tkernels`."""

import sys

from tkernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
