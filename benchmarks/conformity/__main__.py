"""``python -m benchmarks.conformity``: see `cli.py`."""

import sys

from .cli import main

sys.exit(main())
