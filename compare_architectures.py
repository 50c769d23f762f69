"""Compares architectures: `python compare_architectures.py`, the same as `tandem compare`."""

import sys

from tandem.cli.compare import main

if __name__ == "__main__":
    sys.exit(main())
