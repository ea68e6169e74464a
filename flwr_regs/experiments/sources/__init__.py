"""Readers of data sets: each turns files that the user has, or a seed, into arrays.

A reader returns the fields of `flwr_regs.experiments.data.Data` by name. `catalogue` lists all readers with
their arguments; `files` finds files and says which are missing. This folder knows files; it must not know
jobs, clients, partitions or models, nor execute what a file holds.
"""
