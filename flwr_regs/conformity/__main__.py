"""``python -m flwr_regs.conformity``: see `cli.py`."""

import sys

from .cli import main

sys.exit(main())
