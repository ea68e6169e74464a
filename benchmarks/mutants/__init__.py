"""``python -m benchmarks.mutants``: how many wrong lines of the package do its tests catch?"""
