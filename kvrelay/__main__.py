"""`python -m kvrelay`: the command line without an installed script."""

import sys

from kvrelay.cli import main

sys.exit(main())
