"""Flower's older server: the package's strategies in a project of ``ServerAppComponents``.

Knows Flower's older Strategy and ClientProxy, and the adapters of :class:`flwr_regs.RegStrategy`, which
it drives from outside. Must not know what a round is made of, a term, or what travels.
"""
