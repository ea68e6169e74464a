"""A client's own model: made, evaluated and saved in one way, whatever method it comes from.

It is one of these, the first that applies:

- the global model, trained further for an evaluation: the evaluate config's ``"personalise"``, or a term
  that `FineTunes`;
- what a term that `Personalises` makes of the global model and the client's slot;
- the evaluated model itself, if the method keeps entries of the model on the clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flwr_regs.abilities import Personalises
from flwr_regs.chain import Chain
from flwr_regs.client.calibration import calibrate
from flwr_regs.client.measure.accuracy import score
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.member import plain, seeded
from flwr_regs.client.memory import Folder, Root, to_numpy
from flwr_regs.client.train.batches import Batches, to_device
from flwr_regs.client.train.client_result import LocalResult
from flwr_regs.client.train.optimizer import OptimizerFn
from flwr_regs.client.train.trainable import trained_parameters
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays


def own_model(
    measures: Measures,
    term: Chain,
    config: Mapping[str, Any],
    slots: Slot,
    optimizer: OptimizerFn | None = None,
    folder: Root = None,
) -> nn.Module | None:
    """Return this client's own model, in an evaluation; None if nothing makes one.

    The model of `measures` holds the global model and this client's private entries. It may change.
    `config` is the evaluate config, `slots` what the terms remember. With a `folder` the model is also
    saved.
    """
    model = measures.model
    made: nn.Module | None = None
    with seeded(config.get(keys.SEED_KEY, 0), measures.device):
        if (how := _fine_tuning(term, config)) is not None:
            made, head = model, set[str]()
            if term.tuner is not None and "personalise" not in config:
                head = term.tuner.head(list(model.state_dict()))
            if how["personal-lr"]:
                made = calibrate(measures, how, optimizer, head)
        elif term.able(Personalises):
            made = personalised(term, measures, slots, config[keys.PREVIOUS_LR_KEY], config)
    if made is not None and folder is not None and keys.START_KEY in config:
        Folder(folder, config).write_personal(entries_of(made, model))
    return made


def _fine_tuning(term: Chain, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return how the global model is trained further in an evaluation; None if it is not.

    The learning rate is 0 if no round has been trained, and nothing else says it.
    """
    if "personalise" in config:
        return config
    if term.tuner is None:
        return None
    return {"personal-lr": config[keys.PREVIOUS_LR_KEY], **term.tuner.fine_tuning()}


def personalised(
    term: Chain, measures: Measures, slots: Slot, lr: float, config: Mapping[str, Any]
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
    before, training = {n: v.clone() for n, v in model.state_dict().items()}, model.training
    try:
        model.load_state_dict(result.state)
        return entries_of(personalised(term, measures, result.client, **round), model)
    finally:
        model.load_state_dict(before)
        model.train(training)


def entries_of(personal_model: nn.Module, model: nn.Module) -> NDArrays:
    """Return the entries of a client's own model; without those that `model` never trains.

    These are the same on every client, and may be many.
    """
    every = model.named_parameters(remove_duplicate=False)
    still = {n for n, p in every if not p.requires_grad}
    return {n: to_numpy(v).copy() for n, v in personal_model.state_dict().items() if n not in still}


def evaluate(
    measures: Measures,
    term: Chain,
    eval_data: Batches,
    config: Mapping[str, Any],
    slots: Slot,
    **how: Any,
) -> tuple[float, int, dict[str, Any]]:
    """Return (mean loss, examples, metrics) of a model on `eval_data`: see :func:`.evaluation.score`.

    Where this client has a model of its own, the metrics also hold that one's loss and accuracy, as
    ``"personal-loss"`` and ``"personal-accuracy"``.
    `how` are `optimizer` and `folder` of :func:`own_model`, to which the others are given too.
    """
    model, task, device = measures.model, measures.task, measures.device
    loss, count, scores = score(model, eval_data, task, device)
    names = list(model.state_dict())
    made = own_model(measures, term, config, slots, **how)
    metrics: dict[str, Any] = {**scores}
    if made is not None:
        own_loss, _, own_scores = score(made, eval_data, task, device)
    elif term.private(names):
        own_loss, own_scores = loss, scores
    else:
        return loss, count, metrics
    metrics["personal-loss"] = own_loss
    metrics |= {f"personal-{k}": v for k, v in own_scores.items()}
    return loss, count, metrics
