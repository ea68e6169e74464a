"""The result of a client's round, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flwr_regs.term import Slot


@dataclass(frozen=True)
class LocalResult:
    """The result of a client's round; tensors are on the CPU.

    Attributes
    ----------
    state : dict[str, Tensor]
        The model's ``state_dict`` at the end, parameters and buffers.
    delta, upload, client : dict
        ``v_k − w_t`` as the term sends it, the term's upload slot and its client slot.
    num_examples, examples_processed : int
        ``n_k``, the size of the local data set; the examples processed, with repeats.
    num_steps, planned_steps : int
        Local steps taken, ``s_k``, and planned, ``E``; without a budget they are equal.
    loss : float
        Mean training loss per example over the round, without the term's share.
    output_layer : str, optional
        The name of the output layer, if the method reads features.
    """

    state: dict[str, Tensor]
    delta: dict[str, Tensor]
    upload: Slot
    client: Slot
    num_examples: int
    num_steps: int
    planned_steps: int
    examples_processed: int
    loss: float
    output_layer: str | None = None
