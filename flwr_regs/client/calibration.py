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

from torch import nn

from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.client.measure.classifier import find_classifier
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.measure.features import FeatureTap
from flwr_regs.client.train.distillation import self_confidence_loss
from flwr_regs.client.train.optimizer import OptimizerFn
from flwr_regs.client.train.replay import Replay
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
    measures: Measures,
    config: Mapping[str, Any],
    optimizer: OptimizerFn | None,
    head: Collection[str] = (),
) -> nn.Module:
    """Return a copy of a client's model of which a part has been trained on its data.

    Parameters
    ----------
    measures : Measures
        Of the model and the data.
    config : mapping
        ``"personalise"`` and ``"personal-lr"``; optionally ``"personal-part"`` ("head"),
        ``"personal-epochs"`` (2), ``"personal-mu"`` (0.1), ``"personal-lam"`` (0.35) and
        ``"personal-temperature"`` (4).
    head : collection of str
        The ``state_dict`` names of the output layer, if they are known already.

    Raises ValueError if the layer does not make the model's logits, or shares parameters with another; and
    if nothing in the part can be trained.
    """
    tuned = copy.deepcopy(measures.model).to(measures.device).eval()
    part = config.get("personal-part", "head")
    wanted = {id(p) for p in tuned.parameters() if p.requires_grad}
    if part != "all":
        every = tuned.named_parameters(remove_duplicate=False)
        layer = {id(p) for n, p in every if n in head} if head else _classifier(tuned, measures)
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
        measures.data,
        lr=config["personal-lr"],
        epochs=config.get("personal-epochs", 2),
        optimizer=optimizer,
        device=measures.device,
        train_mode=part != "head",
        **vars(measures.task),
    )
    return tuned


def _classifier(model: nn.Module, measures: Measures) -> set[int]:
    """Return the ids of the output layer's parameters."""
    name, task = find_classifier(model, measures.classifier), measures.task
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
    with FeatureTap(model, measures.classifier) as tap:
        for inputs, targets in Replay(measures.data, measures.device).again(1):
            tap.check(task.output(model, inputs, targets))
    return layer_ids
