"""Personalisation by training further: an evaluation mode of every client.

A client starts from the global model and trains a part of it for E local epochs: with the plain loss, a
proximal term, self-confidence distillation, or both. It reports the accuracy of both models on its own
test data. The global model does not change, and the client sends only metrics.

Any strategy runs this with an `evaluate_config` of
``{"personalise": "plain" | "proximal" | "distil" | "both", "personal-lr": 0.05}``. ``"personal-part"``
says what is trained: ``"head"``, the classifier alone (the default: calibration), ``"body"``, all but the
classifier, or ``"all"``. FedBABU's evaluation is this with its own defaults.

While the classifier trains alone, the rest of the model runs in eval mode, so batch norm keeps its
statistics. Other parts train as in a round.

Sources: Ozfatura, Ozfatura, Gündüz, "FedADC" (2021), Sec. IV-D (E = 2); Oh, Kim, Yun, "FedBABU" (2022),
Sec. 4 (the three parts).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.client.measure.classifier import find_classifier
from flwr_regs.client.measure.features import FeatureTap
from flwr_regs.client.train.batches import Batches
from flwr_regs.client.train.distillation import self_confidence_loss
from flwr_regs.client.train.optimizer import OptimizerFn
from flwr_regs.client.train.replay import Replay
from flwr_regs.client.train.task import Task
from flwr_regs.term import Arrays, ClientContext, Term


@dataclass(frozen=True)
class _Distil(Term):
    name: ClassVar[str] = "distil"
    needs: ClassVar[Collection[str]] = ("start_output", "label_counts")
    lam: float
    temperature: float

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        return self_confidence_loss(base, ctx, self.lam, self.temperature)


@dataclass(frozen=True)
class _Pull(Term):
    name: ClassVar[str] = "pull"
    mu: float

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: g + self.mu * (params[n] - ctx.start[n]) for n, g in grads.items()}


def calibrate(
    model: nn.Module,
    train_data: Batches,
    config: Mapping[str, Any],
    *,
    classifier: str | None,
    task: Task,
    optimizer: OptimizerFn | None,
    device: torch.device,
    head: Collection[str] = (),
) -> nn.Module:
    """Return a copy of `model` of which a part has been trained on `train_data`.

    Parameters
    ----------
    config : mapping
        ``"personalise"`` and ``"personal-lr"``; optionally ``"personal-part"`` ("head"),
        ``"personal-epochs"`` (2), ``"personal-mu"`` (0.1), ``"personal-lam"`` (0.35) and
        ``"personal-temperature"`` (4).
    classifier : str, optional
        Name of the output layer; default: the last ``nn.Linear``.
    head : collection of str
        The ``state_dict`` names of the output layer, if they are known already.

    Raises ValueError if the layer does not make the model's logits, or shares parameters with another; and
    if nothing in the part can be trained.
    """
    tuned = copy.deepcopy(model).to(device).eval()
    part = config.get("personal-part", "head")
    wanted = {id(p) for p in tuned.parameters() if p.requires_grad}
    if part != "all":
        every = tuned.named_parameters(remove_duplicate=False)
        if head:
            layer = {id(p) for n, p in every if n in head}
        else:
            layer = _classifier(tuned, train_data, classifier, task, device)
        wanted = wanted & layer if part == "head" else wanted - layer
    if not wanted:
        raise ValueError(f"personal-part = '{part}': nothing there has requires_grad=True")
    for p in tuned.parameters():
        p.requires_grad_(id(p) in wanted)
    kind = config["personalise"]
    terms: list[Term] = []
    if kind in ("distil", "both"):
        lam, temperature = config.get("personal-lam", 0.35), config.get("personal-temperature", 4.0)
        terms.append(_Distil(lam, temperature))
    if kind in ("proximal", "both"):
        terms.append(_Pull(config.get("personal-mu", 0.1)))
    local_round(
        tuned,
        chain(terms),
        train_data,
        lr=config["personal-lr"],
        epochs=config.get("personal-epochs", 2),
        optimizer=optimizer,
        device=device,
        train_mode=part != "head",
        **vars(task),
    )
    return tuned


def _classifier(
    model: nn.Module,
    train_data: Batches,
    classifier: str | None,
    task: Task,
    device: torch.device,
) -> set[int]:
    """Return the ids of the output layer's parameters."""
    name = find_classifier(model, classifier)
    layer = model.get_submodule(name)
    layer_ids = {id(p) for p in layer.parameters() if p.requires_grad}
    inside = set(layer.modules())
    for key, module in model.named_modules():
        if module not in inside and any(id(p) in layer_ids for p in module._parameters.values()):
            raise ValueError(
                f"the classifier '{name}' shares parameters with the layer '{key}': training it alone "
                "would change both"
            )
    # before anything is held still: the tap looks at the trained parameters behind the layer
    with FeatureTap(model, classifier) as tap:
        for inputs, targets in Replay(task.pairs(train_data), device).again(1):
            tap.check(task.output(model, inputs, targets))
    return layer_ids
