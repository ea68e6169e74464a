"""How fast the package is: each file measures one thing, `report` writes the pages.

``python -m benchmarks.speed measure`` takes all measurements, ``measure step clients`` only these; each is
kept in ``docs/studies/speed.json.gz`` when it is done. At the end it prints the tables, and writes
``docs/performance.md``, for users, and ``docs/speed.md``, for developers. Sides that are compared are
interleaved in one process, and what is shown are medians.
"""
