"""A training on the disk: written whole or not at all, checked when read."""
