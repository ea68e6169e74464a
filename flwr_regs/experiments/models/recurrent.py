"""Models of LSTMs, for sequences of integers ``(length,)``: characters or words by number."""

from __future__ import annotations

import torch
from torch import nn

from flwr_regs.experiments.models.body import Body


class Last(nn.Module):
    """Two LSTM layers over embedded integers; the second one's output at the last position."""

    def __init__(self, embedding: nn.Embedding, width: int = 256) -> None:
        super().__init__()
        self.embedding = embedding
        self.lstm = nn.LSTM(embedding.embedding_dim, width, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(n, width)`` from integers ``(n, length)``."""
        out: torch.Tensor = self.lstm(self.embedding(x.long()))[0][:, -1]
        return out


def char_lstm(vocabulary: int) -> Body:
    """McMahan et al. (2017), Sec. 3, as in LEAF: embedding of 8, two layers of 256, the next character.

    819,920 parameters with LEAF's 80 characters. (Keras has one bias where torch has two: 2,048 fewer.)
    """
    return Body([Last(nn.Embedding(vocabulary, 8))], 256)


def sentiment_lstm(vocabulary: int, vectors: torch.Tensor | None = None) -> Body:
    """rFedAvg's for Sent140 (Wang et al. 2023, Sec. VI): two layers of 256 and a linear one of 256.

    The paper's word vectors are pretrained: `vectors`, float32 ``(vocabulary, length)``, which stay fixed.
    Without them, vectors of GloVe's length, 300, are trained from random ones: a departure.
    """
    embedding = nn.Embedding(vocabulary, 300)
    if vectors is not None:
        embedding = nn.Embedding.from_pretrained(vectors)  # type: ignore[no-untyped-call]
    return Body([Last(embedding), nn.Linear(256, 256), nn.ReLU()], 256)
