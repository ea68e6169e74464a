"""The clients of a round in stacks: who goes with whom, and what trains one by one instead. Plain torch."""

from __future__ import annotations

import io
import logging
import math
import pickle
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from flwr_regs.client.serving import Client
from flwr_regs.client.train.batches import resolve_device
from flwr_regs.cohort.batch_plan import CannotStack
from flwr_regs.cohort.evaluation_of_stack import evaluate
from flwr_regs.cohort.member_view import Asked
from flwr_regs.cohort.result_check import difference
from flwr_regs.cohort.stack_groups import (
    Group,
    Kind,
    Recipe,
    Served,
    Settings,
    common_of,
    member_of,
    recipe_of,
)
from flwr_regs.wire import keys
from flwr_regs.wire.errors import described
from flwr_regs.wire.parcel import Parcel

LOG = logging.getLogger("flwr")
ALONE = "no other client of the cohort is like it"
DIFFERS = "between a stack and a client alone"


class Stacks:
    """Trains the clients of a round in stacks, as far as they can.

    Parameters
    ----------
    settings : Settings

    Attributes
    ----------
    fallbacks : dict of str to int
        Why clients train by themselves -> how often, over all rounds.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        if sys.platform == "linux":  # glibc then keeps freed blocks of up to this size, instead of
            torch.empty(31 * 2**20, dtype=torch.uint8)  # mapping them anew in each step
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._builds: WeakKeyDictionary[Client, tuple[Any, ...]] = WeakKeyDictionary()
        self._models: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self.fallbacks: dict[str, int] = {}
        self._untold: list[str] = []

    def train(self, asked: Sequence[Asked]) -> dict[int, Served]:
        """Return, by partition id, what came of those clients that train in a stack; the others wait."""
        common = common_of([one.message.records for one in asked])
        recipes: list[Recipe] = []
        groups: dict[Hashable, Group] = {}
        number: Counter[Kind] = Counter()
        served: dict[int, Served] = {}
        for one in asked:
            try:
                key, group = self._admit(one, recipes, groups, common)
            except Exception as error:  # by itself it says what is wrong, if anything is
                self.note(error)
                continue
            number[group.kind] += 1
            if group.is_full(self._settings.memory):
                served |= self._train(groups.pop(key))
        for group in groups.values():
            if number[group.kind] == 1:
                self.note(CannotStack(ALONE))
            else:
                served |= self._train(group)
        return served

    def evaluate(self, asked: Sequence[Asked]) -> dict[int, Parcel]:
        """Return, by partition id, the replies of those clients that evaluate at once; the others wait."""
        refused = {build for (build, *_), kind in self._kinds.items() if kind.refused}
        try:
            return evaluate([a for a in asked if self._builds.get(a.client) not in refused])
        except Exception as error:  # whatever torch raises: by themselves they say it better
            LOG.debug("clients evaluate one by one", exc_info=error)
            return {}

    def note(self, error: Exception, clients: int = 1) -> None:
        """Count clients that train by themselves, and log the reason once: see also `tell`."""
        ours = isinstance(error, CannotStack)
        why = str(error) if ours else described(error)
        if why not in self.fallbacks and why != ALONE:
            self._untold.append(why)
        self.fallbacks[why] = self.fallbacks.get(why, 0) + clients
        if ours:
            self.tell([why])

    def tell(self, why: Collection[str] | None = None) -> None:
        """Log these of the reasons that are not logged yet, by default all.

        What torch or a hook raised waits until the clients have trained by themselves: if they fail then
        too, their errors say it better, with what helps.
        """
        for reason in [r for r in self._untold if why is None or r in why]:
            level = logging.WARNING if DIFFERS in reason else logging.INFO
            LOG.log(level, "StackedGrid: clients train one by one: %s", reason)
            self._untold.remove(reason)

    # who goes with whom

    def _admit(
        self,
        asked: Asked,
        recipes: list[Recipe],
        groups: dict[Hashable, Group],
        common: Mapping[str, Mapping[str, np.ndarray]],
    ) -> tuple[Hashable, Group]:
        """Put a client into its group; return that. Raises CannotStack if it has none."""
        client = asked.client
        recipe = recipe_of(recipes, client.identity, asked.message, client.model)
        if (build := self._builds.get(client)) is None:
            build = self._builds[client] = self._build(client)
        kind = self._kinds.setdefault((build, recipe.who.method, recipe.probes), Kind(build[1:]))
        if kind.refused:
            raise CannotStack(kind.refused)
        member = member_of(asked, recipe, common)
        plan = member.plan
        key = id(recipe), kind, plan.kind, plan.forms[0], member.form
        if (group := groups.get(key)) is None:
            group = groups[key] = Group(member, recipe, common, self._settings, kind)
        group.add(member)
        return key, group

    def _build(self, client: Client) -> tuple[Any, ...]:
        """Return what clients share that go together: terms, model, loss, optimiser, device."""
        model, who = client.model, client.identity
        if any(name.endswith("_orig_mod") for name, _ in model.named_modules()):
            raise CannotStack(f"{who.who} has a compiled model")
        settings = ("time_budget", "save_private")
        if given := [s for s in settings if getattr(client, s) is not None]:
            raise CannotStack(f"{who.who} has a {given[0]}")
        if resolve_device(client.device).type == "cpu" and any(map(_convolves, model.modules())):
            raise CannotStack("its convolutions are slower in a stack on a CPU")
        if model not in self._models:
            model.train()  # an evaluation may have left it in the other mode
            self._models[model] = Build((*model.parameters(), *model.buffers())).of(model)
        called = Build().of([*vars(client.task).values(), client.optimizer])
        kinds = who.who, who.method, tuple(who.terms), who.keeps_optimizer
        return kinds, self._models[model], called, str(client.device), client.classifier

    # training

    def _train(self, group: Group) -> dict[int, Served]:
        """Train a group; if that fails, or its result is not that of clients alone, none of it."""
        try:
            self._check_result(group)
            return group.replies(group.run())
        except Exception as error:  # whatever torch or a hook raises under vmap
            self.note(error, len(group.members))
            return {}

    def _check_result(self, group: Group) -> None:
        """Compare a stack's result with that of clients alone, if it is due; raise CannotStack."""
        kind, this_round = group.kind, int(group.recipe.config[keys.ROUND_KEY])
        if kind.refused:
            raise CannotStack(kind.refused)
        if self._settings.check is False or this_round < kind.due or len(group.members) == 1:
            return
        if where := difference(group):
            kind.refused = f"{where} {DIFFERS}: see docs/stacked.md"
            raise CannotStack(kind.refused)
        kind.due = (
            math.inf if self._settings.check == "first" else this_round + self._settings.check
        )


class Build(pickle.Pickler):
    """Writes how a value is built: two of equal build do the same.

    Parameters
    ----------
    tensors : iterable of Tensor
        What these hold does not count, but their shapes and dtypes.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file)
        self._by_form = {id(t) for t in tensors}
        self._objects: list[Any] = []

    def of(self, value: Any) -> Hashable:
        """Return the build; one that is equal to no other, of a value that cannot be written."""
        try:
            self.dump(value)
        except Exception:  # of many kinds
            return object()
        return self._file.getvalue(), tuple(self._objects)

    def persistent_id(self, value: Any) -> Any:
        """Return what is written in place of a tensor, a class, or a function of any place."""
        if isinstance(value, Tensor):
            form = tuple(value.shape), value.dtype, value.requires_grad
            return form if id(value) in self._by_form else (*form, value.flatten().tolist())
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return value.__code__, value.__defaults__, value.__kwdefaults__, cells
        if isinstance(value, type | CodeType | ModuleType | BuiltinFunctionType):
            self._objects.append(value)
            return len(self._objects)
        return None


def _convolves(layer: nn.Module) -> bool:
    """Whether a layer is a convolution; of a stack it is a grouped one, which a CPU runs slowly."""
    return isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d)
