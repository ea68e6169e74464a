"""The methods: one file a paper, with its terms, its Strategy and its Client, top to bottom.

Knows the seam, and the strategy and client that it fills in. Must not know another method, the records
that travel, or an experiment. Adding a method changes no other folder.
"""
