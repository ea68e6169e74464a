"""The client side of ``flwr run .``: one partition's data, and a client of the server's method."""

from flwr_regs.experiments.clients import app as app
