"""The client base: one round of :func:`flwr_regs.client.local_round` behind a NumPyClient."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from flwr.client import Client, NumPyClient
from flwr.common import Code, FitIns, FitRes, Parameters, Status
from torch import nn

from flwr_regs.chain import check_classes, name_of
from flwr_regs.client import member
from flwr_regs.client.loading import Pins, pinned
from flwr_regs.client.measure.classifier import find_classifier
from flwr_regs.client.member import Identity
from flwr_regs.client.memory import Memory, Root, to_numpy, written
from flwr_regs.client.train.batches import Batches, check_batches, label_counts
from flwr_regs.client.train.optimizer import OptimizerFn, check_factory
from flwr_regs.client.train.task import LossFn, OutputFn, Task, uncompiled
from flwr_regs.term import NOT_NEGATIVE, SWITCH, WHOLE, Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, ProtocolError, unpack
from flwr_regs.wire.config import Spelled
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.records import to_record, unreadable
from flwr_regs.wire.text import read_json

ArrayList = list[Any]
Config = Mapping[str, Any]


class RegClient(Spelled, NumPyClient):
    """A client for any list of terms; the named clients fix their terms.

    The method's hyper-parameters arrive with each round's config.

    Parameters
    ----------
    model : nn.Module
        The architecture; its weights are replaced by the global model's, by name, each round. It may hold
        bfloat16 if the strategy has ``wire_dtype="bfloat16"``.
    train_data, eval_data : iterable of batches
        Pairs of (inputs, targets), or mappings, such as a DataLoader's; each can be iterated again and
        again. `eval_data` may be missing if the strategy does not evaluate on clients
        (``fraction_evaluate=0``).
    loss_fn : callable, optional
        ``loss_fn(output, targets) -> scalar``, a mean over the batch. None: the model returns its loss.
    target_key, output_fn : str, callable, optional
        The key of the targets in batches that are mappings, and ``output_fn(output) -> logits``; both are
        found if they have usual names: see :class:`flwr_regs.client.train.task.Task`.
    optimizer : callable, optional
        ``optimizer(params, lr=lr)``, this client's own; use ``functools.partial`` for more. Its ``step()``
        finds the gradients in ``.grad``; if it demands a closure, it gets one. None: what the
        strategy's `train_config` describes by ``"optimizer"``, ``"momentum"`` and ``"weight-decay"``, by
        default SGD. A client with its own refuses these keys. Personalisation uses it too (None: SGD).
    keep_optimizer : bool
        The optimiser goes on with its state (AdamW's moments, SGD's momentum) where it was after this
        client's last round, if the server used that round's reply. The state stays on the node. False:
        the optimiser is fresh in each round.
    device : str or torch.device
        ``"auto"``: the accelerator if there is one, else the CPU.
    classifier : str, optional
        Name of the output layer, for methods that read features (default: the last ``nn.Linear``).
    share_label_counts : bool
        Send a strategy with class-covering cohorts the number of training examples of each class. That is
        information about the data: off by default.
    step_budget, time_budget : int, float, optional
        The most local steps, and seconds of training, for one round. The client then stops and reports
        its steps; with 0 steps it is inactive. The strategy's `incomplete` says how such a client counts.
    private : str or sequence of str
        Patterns of the entries that never leave this client, such as ``"head.*"``, whatever the server
        says. A round of a strategy that would not withhold them is refused before training, and so is an
        evaluation. The strategy may withhold more. What the method itself shares of the data, such as
        feature means, says nothing of entries and is not meant.
    save_private : str or path, optional
        A folder on this machine, where the client writes its private entries and what its method keeps
        between rounds, after each round. A node that was restarted then goes on as if nothing had happened,
        also in another run that resumes the training. The folder may be the same for many clients and
        trainings; :func:`flwr_regs.load_private` reads it. None: this dies with the node or the run.
    terms : sequence of Term classes
        Only for your own composition, in the strategy's order.

    Attributes
    ----------
    composition : sequence of Term classes
        The terms of this client: its class's, or those that it was given.
    task : Task
        Its loss, and how its batches are read.

    Raises
    ------
    TypeError
        Data that are no batches, such as a Dataset, or that can be iterated only once; terms that are no
        classes of terms; a model that is no Module.
    ValueError
        A budget of a wrong type, or negative; a model without the output layer that the method reads; a
        pattern in `private` that matches none of the model's entries.
    """

    method: ClassVar[str | None] = None
    terms: ClassVar[Sequence[type[Term]]] = ()

    def __init__(
        self,
        model: nn.Module,
        train_data: Batches,
        eval_data: Batches | None = None,
        *,
        loss_fn: LossFn | None = nn.functional.cross_entropy,
        target_key: str | None = None,
        output_fn: OutputFn | None = None,
        optimizer: OptimizerFn | None = None,
        keep_optimizer: bool = False,
        device: str | torch.device = "auto",
        classifier: str | None = None,
        share_label_counts: bool = False,
        step_budget: int | None = None,
        time_budget: float | None = None,
        private: Pins = (),
        save_private: Root = None,
        terms: Sequence[type[Term]] | None = None,
    ) -> None:
        plain_model = uncompiled(model)
        check_batches(train_data, "train_data")
        if eval_data is not None:
            check_batches(eval_data, "eval_data")
        who = type(self).__name__
        if terms is not None and self.method is not None:
            raise TypeError(f"{who} fixes its terms; use RegClient for others")
        self.composition = self.terms if terms is None else check_classes(terms, who)
        WHOLE.check(who, "step_budget", step_budget, optional=True)
        NOT_NEGATIVE.check(who, "time_budget", time_budget, optional=True)
        SWITCH.check(who, "keep_optimizer", keep_optimizer)
        SWITCH.check(who, "share_label_counts", share_label_counts)
        check_factory(who, optimizer)
        # needs may be a property, which the settings decide
        needs: list[Any] = [t.needs for t in self.composition if not isinstance(t.needs, property)]
        if classifier is not None or any("features" in of_term for of_term in needs):
            find_classifier(plain_model, classifier)  # raises here, before any round
        pinned(private, plain_model)  # raises here, before any round
        self.model, self.train_data, self.eval_data = model, train_data, eval_data
        self.task, self.classifier = Task(loss_fn, target_key, output_fn), classifier
        self.optimizer, self.keep_optimizer, self.device = optimizer, keep_optimizer, device
        self.share_label_counts = share_label_counts
        self.step_budget, self.time_budget = step_budget, time_budget
        self.private, self.save_private = private, save_private

    def to_client(self) -> Client:
        """Return the client as Flower calls it; on another strategy's message its reply ends the run."""
        client = super().to_client()
        fit = client.fit

        def refusing(ins: FitIns) -> FitRes:
            try:
                return fit(ins)
            except ForeignStrategy as error:
                unread = Parameters([unreadable(str(error))], "numpy.ndarray")
                return FitRes(Status(Code.OK, ""), unread, 1, {})

        client.fit = refusing  # type: ignore[method-assign]
        return client

    def get_parameters(self, config: Config) -> ArrayList:
        """Return the model's ``state_dict`` values; PermissionError if some are pinned to this client."""
        if kept := sorted(pinned(self.private, uncompiled(self.model))):
            raise PermissionError(f"this client keeps {kept} to itself (private={self.private!r})")
        return [to_numpy(v).copy() for v in uncompiled(self.model).state_dict().values()]

    def fit(self, parameters: ArrayList, config: Config) -> tuple[ArrayList, int, dict[str, Any]]:
        """Train for one round from the global model: for whoever calls a NumPyClient by hand.

        The `config` names the arrays (``"regs.names"``, as JSON), and holds terms' records as safetensors
        bytes and, under ``"memory"``, what this client remembers. Returns (the local model in the order of
        `parameters`, ``n_k``, metrics). The metrics hold the reply's numbers and entries, the terms'
        uploads by name, and the new memory. An update in the method's code travels in the metrics; beside
        it only buffers that changed differ from `parameters`.

        Raises
        ------
        ProtocolError
            The strategy is for another method or protocol version, does not withhold what this client
            keeps to itself, or its arrays do not fit the model.
        ValueError
            The config lacks a key, holds an unknown one, or there is no training data.
        """
        message, held = _message(parameters, config)
        reply, held, model = member.train(self, message, held)
        records, numbers = dict(reply.records), dict(reply.metrics or {})
        arrays = records.pop(keys.ARRAYS, {})
        metrics = {**numbers, **reply.config, **records, keys.MEMORY: written(held)}
        if model is not None:
            metrics[keys.MODEL] = to_record(model)
        given = zip(message.records[keys.ARRAYS], parameters, strict=True)
        return [arrays.get(n, a) for n, a in given], metrics.pop("num-examples"), metrics

    def evaluate(self, parameters: ArrayList, config: Config) -> tuple[float, int, dict[str, Any]]:
        """Return (mean loss, examples, metrics) on `eval_data`; the `config` is as for :meth:`fit`.

        For classification the metrics hold ``"accuracy"``, the share of correct arg-max. If this client has
        a model of its own, they also hold that one's: see :mod:`flwr_regs.client.personal`.
        """
        reply, _, _ = member.evaluate(self, *_message(parameters, config))
        metrics = {**(reply.metrics or {}), **reply.config}
        return metrics.pop("loss"), metrics.pop("num-examples"), metrics

    def respond(self, kind: str, message: Parcel, held: Memory) -> member.Answer:
        """Return the reply to a message, "train" or "evaluate", in plain values; what is kept, as bytes."""
        serve = member.train if kind == "train" else member.evaluate
        reply, held, model = serve(self, message, held)
        return member.Answer(reply, written(held), model)

    def overrides(self, *names: str) -> list[str]:
        """Return which of these methods of RegClient are this client's own."""
        its, base = type(self), RegClient
        return [n for n in names if n in vars(self) or getattr(its, n) is not getattr(base, n)]

    def get_properties(self, config: Config) -> dict[str, Any]:
        """Return the label counts if `config` requests them; PermissionError if they are not shared."""
        if not config.get(keys.LABELS_KEY):
            return {}
        if not self.share_label_counts:
            remedy = "share_label_counts=True, or the strategy with cohorts='uniform'"
            who = type(self).__name__
            raise PermissionError(f"{who} does not share its label counts; build it with {remedy}")
        counts = label_counts(self.task.pairs(self.train_data))
        return {keys.LABELS_KEY: json.dumps(counts.tolist())}

    @property
    def identity(self) -> Identity:
        """Who it is, whatever round it takes part in."""
        name = self.method or name_of(self.composition)
        kept = (self.private, self.save_private, self.keep_optimizer)
        return Identity(name, self.composition, type(self).__name__, *kept)


def client_class(strategy: Any) -> type[RegClient]:
    """Return the class of a RegStrategy's clients.

    That is the class in the strategy's module with its name and ``Client``, such as `FedFORClient`. Other
    strategies, and compositions, get a class made from the strategy's terms.
    """
    kind = type(strategy)
    beside = getattr(sys.modules.get(kind.__module__), f"{kind.__name__}Client", None)
    if isinstance(beside, type) and issubclass(beside, RegClient):
        return beside
    terms = tuple(type(t) for t in strategy.term.terms if not t.server_only)
    return type(f"{kind.__name__}Client", (RegClient,), {"method": kind.method, "terms": terms})


def _message(parameters: ArrayList, config: Config) -> tuple[Parcel, Memory]:
    """Return (a message's plain values, what the client remembers), as whoever calls by hand gives them."""
    values = dict(config)
    held = values.pop(keys.MEMORY, {})
    if keys.NAMES_KEY not in values:
        if keys.METHOD_KEY in values:
            remedy = "flwr_regs.client_app(client_fn), not with flwr's ClientApp(client_fn)"
            raise ProtocolError(f"the config names no arrays: build the ClientApp with {remedy}")
        return Parcel({}, values), held
    names = read_json(values.pop(keys.NAMES_KEY))
    packed = [n for n in values if n.endswith(".broadcast") or n == keys.STEP]
    records = {n: unpack(values.pop(n)) for n in packed}
    records[keys.ARRAYS] = dict(zip(names, parameters, strict=True))
    return Parcel(records, values), held
