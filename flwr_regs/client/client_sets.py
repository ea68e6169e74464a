"""Clients as data: one model, and for each client its data sets. Plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import data

import flwr_regs.client.train.remedies as remedies
from flwr_regs.client.measure.classifier import evaluating, find_classifier
from flwr_regs.client.member import Identity
from flwr_regs.client.memory import Root
from flwr_regs.client.train.batches import (
    DRAWING,
    Batches,
    check_batches,
    forked,
    is_dataset,
    resolve_device,
)
from flwr_regs.client.train.optimizer import OptimizerFn, check_factory
from flwr_regs.client.train.task import LossFn, OutputFn, Task, uncompiled
from flwr_regs.term import COUNT, WHOLE
from flwr_regs.wire.config import Spelled

TEST_BATCH = 256
"""The least number of examples in a batch of a test set."""
Budgets = Sequence[int | None] | Mapping[int, int] | Callable[[int, int], int | None] | None


@dataclass(eq=False)
class OneClient:
    """One of the clients, as :class:`flwr_regs.client.member.Client` describes it."""

    model: nn.Module
    train_data: Batches
    eval_data: Batches | None
    task: Task
    identity: Identity
    optimizer: OptimizerFn | None
    device: str | torch.device
    classifier: str | None
    step_budget: int | None = None
    time_budget: float | None = None
    save_private: Root = None


class ClientSets(Spelled):
    """What `flwr_regs.Clients` holds, without Flower; its docstring has the arguments."""

    by_round = False
    """Whether `sets_of`, which a subclass may have of its own, differs from round to round."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        train_sets: Any,
        test_sets: Any = None,
        *,
        batch_size: int = 32,
        loss_fn: LossFn | None = nn.functional.cross_entropy,
        optimizer: OptimizerFn | None = None,
        target_key: str | None = None,
        output_fn: OutputFn | None = None,
        device: str | torch.device = "auto",
        classifier: str | None = None,
        step_budgets: Budgets = None,
        num_clients: int | None = None,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be an nn.Module or return one, not {type(model).__name__}")
        COUNT.check("Clients", "batch_size", batch_size)
        check_factory("Clients", optimizer)
        if device != "auto":
            resolve_device(device)  # raises
        self._given_model = model
        self.batch_size, self.optimizer, self.device = int(batch_size), optimizer, device
        self.task, self.classifier = Task(loss_fn, target_key, output_fn), classifier
        if as_list := getattr(step_budgets, "tolist", None):  # an array, a tensor or a Series
            step_budgets = as_list()
        if not isinstance(step_budgets, Sequence | Mapping | Callable | None):
            kinds = "an entry for each client, or a function of (client, round)"
            raise TypeError(f"step_budgets must be {kinds}, not {step_budgets!r:.80}")
        self.step_budgets = step_budgets
        self._train = _as_sets(train_sets, "train_sets", num_clients)
        self._test, number = list[Any](), len(self._train)
        if num_clients not in (None, number):
            raise ValueError(f"train_sets has {number} entries, but num_clients is {num_clients}")
        if test_sets is not None:
            self._test = _as_sets(test_sets, "test_sets", number)
            if (tests := len(self._test)) != number:
                raise ValueError(f"test_sets has {tests} entries, but train_sets has {number}")
        if isinstance(step_budgets, Sequence) and len(step_budgets) != number:
            raise ValueError(f"step_budgets has {len(step_budgets)} entries for {number} clients")
        if isinstance(step_budgets, Mapping) and (odd := [*step_budgets.keys() - range(number)]):
            raise ValueError(
                f"step_budgets: the clients are 0 to {number - 1}, there is no {odd[0]!r}"
            )
        if step_budgets is not None and not callable(step_budgets):
            for pid in range(number):
                self.step_budget(pid, 0)  # raises
        if classifier is not None:
            find_classifier(uncompiled(self.model), classifier)  # raises here, before any round

    def __len__(self) -> int:
        return len(self._train)

    def __repr__(self) -> str:
        kinds = sorted({_name(given) for given in self._train})
        tested = ", with test sets" if self._test else ""
        what = f"{len(self)} clients of {_name(self._given_model)} on {', '.join(kinds)}"
        return f"{type(self).__name__}({what}, batch_size={self.batch_size}{tested})"

    def __getstate__(self) -> dict[str, Any]:
        given = isinstance(self._given_model, nn.Module)
        return {name: value for name, value in vars(self).items() if given or name != "model"}

    @cached_property
    def model(self) -> nn.Module:
        """The model in which the clients of this process train."""
        given = self._given_model
        made = given if isinstance(given, nn.Module) else given()
        if not isinstance(made, nn.Module):
            raise TypeError(f"model must return an nn.Module, not {type(made).__name__}")
        return made

    def fresh_model(self) -> nn.Module:
        """Return a model for a client that is made for one message: a new one, where it can be made."""
        given = self._given_model
        return self.model if isinstance(given, nn.Module) else given()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let clients train in the model, one thread's at a time; it is as before afterwards."""
        model = uncompiled(self.model)
        with DRAWING:  # trainings in several threads may have one model
            before = {n: v.detach().clone() for n, v in model.state_dict().items()}
            try:
                with evaluating(model):  # then each module has its mode again
                    yield
            finally:
                model.load_state_dict(before)

    def sets_of(self, pid: int, server_round: int = 0) -> tuple[Batches, Batches | None]:
        """Return a client's (training data, test data) as batches."""
        train = _checked(self._train[pid], "train_sets", pid)
        batches, size = _batches(train, self.batch_size, shuffle=True), self.batch_size
        if not self._test:
            return batches, None
        test = _checked(self._test[pid], "test_sets", pid)
        return batches, _batches(test, max(size, TEST_BATCH), shuffle=False)

    def check(self, evaluates: bool, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError for what would go wrong in round 1: no test sets, if a strategy `evaluates`.

        And for initial arrays, of these `shapes`, that the model has not, or has in another shape. And in
        sets that are tensors: numbers that are not finite; inputs of a type or width that the
        model does not take; labels of a wrong type or shape, or that are none of the model's classes.
        """
        if evaluates and not self._test:
            raise ValueError(
                "the clients have no test sets to evaluate on: give Clients test_sets=, or set "
                "fraction_evaluate=0 on the strategy"
            )
        entries = {n: tuple(v.shape) for n, v in uncompiled(self.model).state_dict().items()}
        for name, shape in shapes.items():
            if (there := entries.get(name)) is None:
                has = f"(it has {', '.join(entries):.200})"
                why = f"has '{name}', but the clients' model has no such entry {has}"
                raise ValueError(f"initial_arrays {why}")
            if shape != there:
                why = f"'{name}' has the shape {shape}, but {there} in the clients' model"
                raise ValueError(f"initial_arrays: {why}")
        sets = [("train_sets", self._train), ("test_sets", self._test)]
        each = [(f"{n}: client {pid}", given) for n, of in sets for pid, given in enumerate(of)]
        tensors = [(w, given.tensors) for w, given in each if type(given) is data.TensorDataset]
        for whose, given in tensors:
            if not remedies.are_finite([*given]):
                rows = enumerate(zip(*given, strict=True))
                first = next(i for i, row in rows if not remedies.are_finite([*row]))
                why = f"example {first} holds NaN or infinity: leave it out, or fill its gaps"
                raise ValueError(f"{whose}: {why}")
        loss_fn, outputs = self.task.loss_fn, dict[Any, Any]()
        if not remedies.is_cross_entropy(loss_fn):
            return
        try:
            model = copy.deepcopy(uncompiled(self.model)).cpu().eval()
        except Exception:  # a model that cannot be copied is not tried
            return
        for whose, (inputs, labels, *_) in tensors:
            kind, error = (inputs.dtype, inputs.shape[1:]), None
            if kind not in outputs:
                try:
                    with torch.no_grad(), forked():
                        outputs[kind] = self.task.output(model, inputs[:2].clone())
                except Exception as raised:  # whatever a user's model raises
                    outputs[kind], error = None, raised
            if isinstance(output := outputs[kind], Tensor):
                output = output[:1].expand(len(labels), *output.shape[1:])
            if why := remedies.remedy(error, inputs, output, labels, model, loss_fn):
                raise ValueError(f"{whose}: {why}") from error

    def client(self, pid: int, identity: Identity, server_round: int = 0) -> OneClient:
        """Return a client of a method."""
        sets = self.sets_of(pid, server_round)
        return OneClient(
            self.model, *sets, self.task, identity, self.optimizer, self.device, self.classifier
        )

    def step_budget(self, pid: int, server_round: int) -> int | None:
        """Return the most local steps of a client in a round; None if there is no limit.

        Raises ValueError for what is neither None nor a whole number of at least 0.
        """
        budgets = self.step_budgets
        if budgets is None:
            return None
        if callable(budgets):
            budget = budgets(pid, server_round)
        else:
            budget = budgets.get(pid) if isinstance(budgets, Mapping) else budgets[pid]
        WHOLE.check("Clients", f"step_budgets[{pid}]", budget, optional=True)
        return None if budget is None else int(budget)


def _as_sets(given: Any, name: str, number: int | None) -> list[Any]:
    """Return what was given for each client: a checked data set, or a function that makes one."""
    if hasattr(given, "load_partition"):  # flwr-datasets
        parts = getattr(given, "partitioners", {"": given})
        if (count := len(parts)) != 1:
            raise ValueError(f"{name}: a FederatedDataset must have one partitioner, not {count}")
        return [given.load_partition] * int(next(iter(parts.values())).num_partitions)
    if _is_function(given):
        if number is None:
            raise ValueError(f"{name} is one function for all clients: say num_clients=")
        COUNT.check("Clients", "num_clients", number)
        return [given] * number
    if isinstance(given, Mapping):
        if sorted(given) != list(range(len(given))):
            raise ValueError(f"{name}: keys must be 0 to {len(given) - 1}, not {[*given]!r:.80}")
        given = [given[pid] for pid in range(len(given))]
    if not isinstance(given, list | tuple) or (given and isinstance(given[0], Tensor | np.ndarray)):
        kind = type(given).__name__
        raise TypeError(f"{name} must be a list of a data set for each client, not a {kind}")
    if not given:
        raise ValueError(f"{name} is empty: there must be a data set for each client")
    return [g if _is_function(g) else _checked(g, name, pid) for pid, g in enumerate(given)]


def _is_function(given: Any) -> bool:
    """Whether this is a function of a client's number, and no data set."""
    return callable(given) and not hasattr(given, "__getitem__") and not hasattr(given, "__iter__")


def _checked(given: Any, name: str, pid: int) -> Any:
    """Return a client's data set: a pair as a TensorDataset; raise for one that is empty or no data."""
    where, given = f"{name}: client {pid}", given(pid) if _is_function(given) else given
    if isinstance(given, list | tuple) and given and isinstance(given[0], Tensor | np.ndarray):
        if len(given) != 2:
            raise TypeError(f"{where} has {len(given)} tensors, expected a pair (inputs, targets)")
        # they stay where they are, whatever the user's default device is
        inputs, targets = (torch.as_tensor(a, device=getattr(a, "device", "cpu")) for a in given)
        if not inputs.ndim or not targets.ndim or len(inputs) != len(targets):
            shapes = (
                f"inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)}"
            )
            raise ValueError(f"{where} has {shapes}, expected equal first dimensions")
        given = data.TensorDataset(inputs, targets)
    streamed = isinstance(getattr(given, "dataset", given), data.IterableDataset)
    if isinstance(given, Sized) and not streamed and not len(given):
        none = f"{type(given).__name__} that yields no batch (too few examples for drop_last=True?)"
        raise ValueError(f"{where} has {'an empty data set' if is_dataset(given) else f'a {none}'}")
    if not is_dataset(given) and not isinstance(given, data.IterableDataset):
        try:
            check_batches(given, "train_data" if name == "train_sets" else "eval_data")
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from None
    return given


def _batches(given: Any, size: int, shuffle: bool) -> Batches:
    """Return a data set as batches; batches as they are."""
    streamed = isinstance(given, data.IterableDataset)
    if not is_dataset(given) and not streamed:
        return given  # type: ignore[no-any-return]
    if not isinstance(given, data.Dataset) and given.format["type"] is None:  # Hugging Face's
        given = given.with_format("torch")
    return data.DataLoader(given, size, shuffle and not streamed)


def _name(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))
