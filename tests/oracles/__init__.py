"""Numerical oracles: each federated method once more, in plain NumPy float64, from the papers.

Used by tests only. Nothing here imports the package under test, torch or flwr. Each method's round
loop is written out in full in its own file, next to the equation or algorithm line it follows, and
the repetition between the files is meant: each can be read against its paper alone.
"""
