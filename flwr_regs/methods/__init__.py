"""The methods: one file per paper, with its terms, its Strategy and its Client; and their registry.

Knows terms, what `client` computes for them, and the strategy and client classes that a method fills in.
Must not know another method (compositions/ does), the records that travel, or an experiment. A new method
needs no change in `client`, `server`, `wire` or `flower`.
"""
