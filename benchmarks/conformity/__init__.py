"""Whether another library's methods do what their papers say.

Knows a small task, plain loops in float64, and how known implementations differ from their papers.
Runs other libraries in environments of their own. Loads numpy alone.
Must not know the rest of the package, so that the loops can judge anyone.
"""
