"""One file per method: its terms, its Strategy and its Client, top to bottom."""
