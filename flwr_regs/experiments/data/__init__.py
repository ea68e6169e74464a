"""Data sets as arrays: the package's and a user's own."""
