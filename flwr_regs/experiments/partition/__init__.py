"""Which examples each client holds, and how its data shift."""
