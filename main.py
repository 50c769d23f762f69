"""Launches a role: `python main.py --role ROLE`, the same as `tandem ROLE`."""

import sys

from tandem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
