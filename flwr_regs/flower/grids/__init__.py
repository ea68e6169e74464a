"""Grids that train in this process, or in processes of its own, and what reaches clients through a grid."""
