"""Comparisons of methods: data, partitions, models, settings, reports and the command line.

Knows the methods by their public names, and needs the extra "simulation". Must not be known by any other
folder: a deployed federation runs without it.
"""
