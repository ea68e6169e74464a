"""Flower's older server: the package's strategies in a project of ``ServerAppComponents``.

Knows Flower's older Strategy and ClientProxy, and the ``configure_*`` and ``aggregate_*`` methods of
:class:`flwr_regs.RegStrategy`. Must not know the parts of a round, a term, or the content of messages.
"""
