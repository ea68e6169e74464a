"""The server's test of a global model: outputs, loss and accuracy, and what each client can expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from flwr_regs.client.train.batches import resolve_device
from flwr_regs.experiments.data.losses import LOSSES
from flwr_regs.experiments.partition.client_data import ClientData
from flwr_regs.experiments.run.process_state import threads

BATCH = 1000
"""Examples of one pass; small enough for Ctrl-C to end a pass within seconds."""

Told = Callable[[int, int], None]
"""Called with (examples done, examples in all)."""


class ServerTest:
    """Tests models of one run on the server's examples; it keeps the last outputs.

    Parameters
    ----------
    model : nn.Module
        Gets the weights that are tested.
    clients : ClientData
    many_threads : int
        For models with recurrent layers, whose time they shorten; others use one.
    told : callable, optional
        Called with (examples done, examples in all).

    Attributes
    ----------
    ensemble : list of Tensor
        The last models' probabilities, for :meth:`together`: ``(examples, classes)`` each.
    """

    def __init__(
        self, model: nn.Module, clients: ClientData, many_threads: int, told: Told = lambda *_: None
    ) -> None:
        self.device = resolve_device("auto")
        self.model, self.clients, self._told = model.to(self.device).eval(), clients, told
        tested = clients.data.tested(*clients.server_rows())
        self.x, self.y = (torch.from_numpy(part).to(self.device) for part in tested)
        self.loss = LOSSES[clients.data.loss]
        recurrent = any(isinstance(layer, nn.RNNBase) for layer in model.modules())
        self._threads = many_threads if recurrent else 1
        self.ensemble: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None

    def outputs(self, arrays: ArrayRecord, most: int | None = None) -> torch.Tensor:
        """Return a model's outputs, of the first `most` examples if that is given."""
        self.model.load_state_dict(arrays.to_torch_state_dict())
        x, parts = self.x[:most], list[torch.Tensor]()
        with torch.no_grad(), threads(self._threads):
            for batch in torch.split(x, BATCH):
                self._told(BATCH * len(parts), len(x))
                parts.append(self.model(batch.clone()))  # a forward may write to it
        return torch.cat(parts)

    def measured(
        self, arrays: ArrayRecord, server_round: int, keep: bool = True
    ) -> dict[str, float]:
        """Return a model's mean loss and accuracy, with the labels of a round; keep the outputs."""
        output = self.outputs(arrays)
        classes = self.clients.labels(np.arange(self.clients.data.num_classes), server_round)
        self._targets = torch.from_numpy(classes).to(self.device)[self.y]
        if keep:
            self.last = output
        return {"loss": float(self.loss(output, self._targets)), "accuracy": self._share(output)}

    def together(self, most: int) -> dict[str, float]:
        """Return the accuracy of the mean prediction of the last `most` models that were measured.

        The mean of the probabilities that the last global models give: a temporal ensemble, which FedADC
        (Sec. IV-E) suggests; the strategies that it names for it average weights.
        """
        assert self.last is not None
        self.ensemble = [*self.ensemble, self.last.softmax(1)][-most:]
        return {"ensemble": self._share(sum(self.ensemble[1:], self.ensemble[0]))}

    def _share(self, output: torch.Tensor) -> float:
        return float((output.argmax(1) == self._targets).double().mean())

    def expected_accuracies(self) -> Any:
        """Return each client's expected accuracy on new data of its label distribution: ``(clients,)``.

        It is that of the model whose outputs were kept last; NaN without a test example of its labels.
        """
        assert self.last is not None
        counts = self.clients.label_counts
        right = (self.last.argmax(1) == self._targets).double()
        there = torch.bincount(self.y, minlength=counts.shape[1]).cpu().numpy()
        hits = torch.bincount(self.y, right, minlength=counts.shape[1]).cpu().numpy()
        seen = counts / counts.sum(1, keepdims=True) * (there > 0)  # no test data tells nothing
        share = np.where(seen.any(1), seen.sum(1), np.nan)
        return seen @ (hits / np.maximum(there, 1)) / share
