"""`python -m tandem ROLE`: the console command without its script."""

import sys

from tandem.cli.main import main

sys.exit(main())
