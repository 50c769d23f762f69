"""`python -m tandem ROLE`."""

import sys

from tandem.cli.main import console

sys.exit(console())
