"""``python -m tvmgemm``: see ``tvmgemm.cli``."""

import sys

from tvmgemm.cli import main

sys.exit(main())
