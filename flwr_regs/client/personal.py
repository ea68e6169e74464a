"""A client's own model: made, evaluated and saved in one way, whatever method it comes from.

It is one of these, the first that applies:

- the global model, trained further for an evaluation: the evaluate config's ``"personalise"``, or a term
  that `FineTunes`;
- what a term that `Personalises` makes of the global model and the client's slot;
- the evaluated model itself, if the method keeps entries of the model on the clients.

Training further is an evaluation mode of every client. It starts from the global model, and trains a part
of it for E local epochs: with the plain loss, a proximal term, self-confidence distillation, or both. It
reports the accuracy of both models on its own test data. The global model does not change, and the client
sends only metrics.

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
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flwr_regs.abilities import FineTunes, Personalises
from flwr_regs.chain import Chain, chain
from flwr_regs.client.local_training import LocalResult, local_round
from flwr_regs.client.measure.classifier import FeatureTap, restored
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.memory import Folder, Root, to_numpy
from flwr_regs.client.train.batches import Batches, Replay, batch_size, on_device, seeded, to_device
from flwr_regs.client.train.distillation import self_confidence_loss
from flwr_regs.client.train.optimizer import Factory
from flwr_regs.client.train.task import Task
from flwr_regs.client.train.trainable import trained_parameters
from flwr_regs.term import Arrays, ClientContext, Config, Slot, Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.config import plain


def own_model(
    measures: Measures, term: Chain, config: Config, slots: Slot, optimizer: Factory, folder: Root
) -> nn.Module | None:
    """Return this client's own model, in an evaluation; None if nothing makes one.

    The model of `measures` holds the global model and this client's private entries. It may change.
    `config` is the evaluate config, `slots` what the terms remember. With a `folder` the model is also
    saved.
    """
    model = measures.model
    made: nn.Module | None = None
    with seeded(config.get(keys.SEED_KEY, 0), measures.device):
        if "personalise" in config:
            made = calibrate(measures, config, optimizer)
        elif tuners := term.able(FineTunes):
            how = {"personal-lr": config[keys.PREVIOUS_LR_KEY], **tuners[0].fine_tuning()}
            head = tuners[0].head(list(model.state_dict()))
            # the rate is 0 if no round has been trained, and nothing else says it
            made = calibrate(measures, how, optimizer, head) if how["personal-lr"] else model
        elif term.able(Personalises):
            made = personalised(term, measures, slots, config[keys.PREVIOUS_LR_KEY], config)
    if made is not None and folder is not None and keys.START_KEY in config:
        Folder(folder, config).write_personal(entries_of(made, model))
    return made


def personalised(
    term: Chain, measures: Measures, slots: Slot, lr: float, config: Config
) -> nn.Module:
    """Turn a loaded model into this client's own, given the terms' client slots; return it."""
    model = measures.model.to(measures.device).eval()
    values = trained_parameters(model, term)
    private = term.private(list(model.state_dict()))
    ctx = measures.context(
        {n: p.detach().clone() for n, p in values.items() if n not in private},
        lr,
        num_steps=0,
        client=to_device(slots, measures.device),
        client_id=config.get(keys.CLIENT_KEY, -1),
        config=plain(config),
    )
    with torch.no_grad():
        for n, p in term.personal(ctx.start, ctx).items():
            values[n].copy_(p)
    return model


def trained_model(term: Chain, measures: Measures, result: LocalResult, **round: Any) -> NDArrays:
    """Return this client's own model after a round, to be saved; {} if no term keeps one.

    The model of `measures` stays as it is. `round` are `lr` and `config` of :func:`personalised`.
    """
    kept = [t for t in term.able(Personalises) if result.client.get(t.name)]
    if not kept or not result.num_steps:
        return {}
    model = measures.model
    with restored(model):
        model.load_state_dict(result.state)
        return entries_of(personalised(term, measures, result.client, **round), model)


def entries_of(personal_model: nn.Module, model: nn.Module) -> NDArrays:
    """Return the entries of a client's own model; without those that `model` never trains.

    These are the same on every client, and may be many.
    """
    every = model.named_parameters(remove_duplicate=False)
    still = {n for n, p in every if not p.requires_grad}
    return {n: to_numpy(v).copy() for n, v in personal_model.state_dict().items() if n not in still}


@torch.no_grad()
def score(
    model: nn.Module, data: Batches, measures: Measures
) -> tuple[float, int, dict[str, float]]:
    """Return (mean loss, examples, metrics) of a model on `data`, as :func:`means` has them.

    Of `measures` are the task and the device.
    """
    task, device = measures.task, measures.device
    model.to(device).eval()
    metrics, count = means(model, on_device(task.pairs(data), device), task)
    values = {name: float(mean) for name, mean in metrics.items()}
    return values.pop("loss"), count, values


def means(
    model: nn.Module, pairs: Iterable[tuple[Any, Any]], task: Task
) -> tuple[dict[str, Tensor], int]:
    """Return (metrics over the examples of all batches, their number); also of one client under vmap.

    They are ``"loss"`` and, where the task is classification, ``"accuracy"``, the share of correct arg-max:
    outputs ``(n, classes)``, integer targets ``(n,)``. Raises ValueError if there is no batch.
    """
    sums, count, sorts = dict[str, Any](loss=0, accuracy=0), 0, True
    for inputs, targets in pairs:
        output = task.output(model, inputs, targets)
        size = batch_size(targets)
        sums["loss"] = sums["loss"] + task.loss(output, targets).cpu().double() * size
        count += size
        sorts &= classifies(output, targets)
        if sorts:
            right = (output.argmax(dim=1) == targets).sum().cpu().double()
            sums["accuracy"] = sums["accuracy"] + right
    if count == 0:
        raise ValueError("the client has no evaluation data: eval_data holds no batch")
    return {name: sums[name] / count for name in ("loss", "accuracy")[: 1 + sorts]}, count


def classifies(output: Any, targets: Any) -> bool:
    """Whether a batch's output and targets are those of a classification."""
    if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return False
    labels = targets.ndim == 1 and not targets.is_floating_point()
    return labels and output.ndim == 2 and output.shape[1] > 1


# training further


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
    measures: Measures, config: Config, optimizer: Factory, head: Collection[str] = ()
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
    distil = _Distil(config.get("personal-lam", 0.35), config.get("personal-temperature", 4.0))
    pull = _Pull(config.get("personal-mu", 0.1))
    terms: Any = {"plain": [], "distil": [distil], "proximal": [pull], "both": [distil, pull]}
    local_round(
        tuned,
        chain(terms[config["personalise"]]),
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
    # before anything is held still: the tap looks at the trained parameters behind the layer
    with FeatureTap(model, measures.classifier) as tap:
        for inputs, targets in Replay(measures.data, measures.device).again(1):
            tap.check(measures.task.output(model, inputs, targets))
    layer = model.get_submodule(tap.layer)
    layer_ids = {id(p) for p in layer.parameters() if p.requires_grad}
    inside = set(layer.modules())
    for key, module in model.named_modules():
        if module not in inside and any(id(p) in layer_ids for p in module._parameters.values()):
            raise ValueError(
                f"the classifier '{tap.layer}' shares parameters with '{key}': training it changes both"
            )
    return layer_ids
