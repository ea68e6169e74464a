"""A client's round: local training, its data, and what is measured over them. Plain torch.

Knows terms (the seam) and how arrays travel (`wire`, without its records). Must not know Flower, the
server, or any method by name: it also runs in a user's own training loop.

Offers ``local_round``, the package's training loop, and ``LocalTraining``, a method's part in any loop.
"""

from flwr_regs.client.local_training import LocalTraining, local_round

__all__ = ["LocalTraining", "local_round"]
