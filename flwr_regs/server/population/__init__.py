"""The clients that a server knows, those it draws, and what becomes of incomplete ones."""
