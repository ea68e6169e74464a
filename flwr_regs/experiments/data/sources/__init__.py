"""Readers of data sets: each turns files that the user has, or a seed, into arrays.

The folder knows the files' formats. A reader returns the fields of
`flwr_regs.experiments.data.datasets.Data`; catalogue.toml lists all readers with their arguments. It must
not know runs, clients, partitions and models, and never executes what a file holds.
"""
