"""Drivers of other implementations; each runs in an environment of its own, under `host.py`."""
