"""Many clients trained at once, stacked under ``torch.func.vmap``. Plain torch.

Knows one client (`client`) and the seam. Must not know Flower, the server, or any method by name.
"""
