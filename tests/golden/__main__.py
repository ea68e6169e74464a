"""Write the golden messages of the named scenarios, or of all: ``python -m tests.golden [name ...]``."""

import logging
import sys

from tests.golden.messages import write
from tests.golden.scenarios import SCENARIOS, messages

logging.getLogger("flwr").setLevel(logging.ERROR)
write({name: messages(name) for name in sys.argv[1:] or SCENARIOS})
