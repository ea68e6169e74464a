"""The server's half: the global model, the course of a round, and what is kept between rounds.

Knows terms (the seam), numpy, and how arrays travel (`wire`, without its records). Must not know Flower,
torch or any method by name. A :class:`~flwr_regs.server.exchange.network.Network` carries its messages, so
a test with its own Network can run a training.
"""
