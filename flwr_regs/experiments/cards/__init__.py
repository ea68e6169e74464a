"""Protocol cards: tables and figures of papers as settings, and their runs."""
