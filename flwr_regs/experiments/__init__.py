"""Comparisons of methods: data, partitions, models, settings, reports and the command line.

Knows the methods by their public names, and needs the extra "bench". No other folder may import it:
a deployed federation runs without it.
"""
