"""Personalisation by classifier calibration: an evaluation mode of every client.

A client starts from the global model and trains only its classifier for E local epochs: with the plain
loss, a proximal term, self-confidence distillation, or both. It reports the accuracy of both models on
its own test data. The global model does not change, and the client sends only metrics.

Any strategy runs this with an `evaluate_config` of
``{"personalise": "plain" | "proximal" | "distil" | "both", "personal-lr": 0.05}``.

The rest of the model runs in eval mode while the classifier trains, so batch norm keeps its statistics.

Source: Ozfatura, Ozfatura, Gündüz, "FedADC" (2021), Sec. IV-D (E = 2).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from flwr_regs.abilities import Personalises
from flwr_regs.chain import Chain, chain
from flwr_regs.client.batches import Batches
from flwr_regs.client.classifier import find_classifier
from flwr_regs.client.distillation import self_confidence_loss
from flwr_regs.client.evaluation import score
from flwr_regs.client.features import FeatureTap
from flwr_regs.client.optimizer import OptimizerFn
from flwr_regs.client.received import personalise, seeded
from flwr_regs.client.replay import Replay
from flwr_regs.client.task import Task
from flwr_regs.client.training import local_round
from flwr_regs.term import Arrays, ClientContext, Term
from flwr_regs.wire import keys


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
) -> nn.Module:
    """Return a copy of `model` whose classifier has been trained on `train_data`.

    Parameters
    ----------
    config : mapping
        ``"personalise"`` and ``"personal-lr"``; optionally ``"personal-epochs"`` (2),
        ``"personal-mu"`` (0.1), ``"personal-lam"`` (0.35) and ``"personal-temperature"`` (4).
    classifier : str, optional
        Name of the output layer; default: the last ``nn.Linear``.

    Raises ValueError if the layer does not make the model's logits, or shares parameters with another.
    """
    name = find_classifier(model, classifier)
    mine = copy.deepcopy(model)
    layer = mine.get_submodule(name)
    wanted = {id(p) for p in layer.parameters() if p.requires_grad}
    inside = set(layer.modules())
    for key, module in mine.named_modules():
        if module not in inside and any(id(p) in wanted for p in module._parameters.values()):
            raise ValueError(
                f"the classifier '{name}' shares parameters with the layer '{key}': training it alone "
                "would change both"
            )
    mine.to(device).eval()
    with FeatureTap(mine, classifier) as tap:  # while the parameters after the layer are still seen
        for inputs, targets in Replay(task.pairs(train_data), device, record=False).again(1):
            tap.check(task.output(mine, inputs, targets))
    for p in mine.parameters():
        p.requires_grad_(id(p) in wanted)
    kind = config["personalise"]
    terms: list[Term] = []
    if kind in ("distil", "both"):
        lam, temperature = config.get("personal-lam", 0.35), config.get("personal-temperature", 4.0)
        terms.append(_Distil(lam, temperature))
    if kind in ("proximal", "both"):
        terms.append(_Pull(config.get("personal-mu", 0.1)))
    local_round(
        mine,
        chain(terms),
        train_data,
        lr=config["personal-lr"],
        epochs=config.get("personal-epochs", 2),
        optimizer=optimizer,
        device=device,
        train_mode=False,
        **vars(task),
    )
    return mine


def evaluate(
    model: nn.Module,
    term: Chain,
    eval_data: Batches,
    train_data: Batches,
    config: Mapping[str, Any],
    *,
    task: Task,
    device: torch.device,
    **kwargs: Any,
) -> tuple[float, int, dict[str, Any]]:
    """Return (mean loss, examples, metrics) of `model` on `eval_data`: see :func:`.evaluation.score`.

    Where `config` says ``"personalise"``, or `term` has a model of the client's own, the metrics also hold
    the loss and accuracy of that model, as ``"personal-loss"`` and ``"personal-accuracy"``, and the name of
    the output layer that was calibrated. `kwargs` are `classifier` and `optimizer` of :func:`calibrate`.
    """
    loss, count, scores = score(model, eval_data, task, device)
    metrics: dict[str, Any] = {**scores}
    mine = None
    if "personalise" in config:
        with seeded(config[keys.SEED_KEY], device):
            mine = calibrate(model, train_data, config, task=task, device=device, **kwargs)
        metrics[keys.LAYER_KEY] = find_classifier(model, kwargs["classifier"])
    elif any(isinstance(t, Personalises) for t in term.terms):
        with seeded(config[keys.SEED_KEY], device):
            own = {"device": device, "classifier": kwargs["classifier"]}
            personalise(model, term, config, train_data, task=task, **own)
        mine = model
    if mine is not None:
        personal_loss, _, personal = score(mine, eval_data, task, device)
        metrics["personal-loss"] = personal_loss
        metrics |= {f"personal-{k}": v for k, v in personal.items()}
    return loss, count, metrics
