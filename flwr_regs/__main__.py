"""``python -m flwr_regs``: the command ``flwr-regs``, also where its script is on no path."""

import sys

from flwr_regs.experiments.cli import main

if __name__ == "__main__":
    sys.exit(main())
