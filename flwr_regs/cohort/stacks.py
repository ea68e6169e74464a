"""The clients of a round in stacks: who goes with whom, and what trains one by one instead. Plain torch.

And the global model on the test sets of many clients at once.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import math
import operator
import pickle
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from flwr_regs.client import memory as memories
from flwr_regs.client.measure.classifier import restored
from flwr_regs.client.member import Answer, Asked, Client, evaluate, evaluated, reply_entries
from flwr_regs.client.personal import means
from flwr_regs.client.train.batches import resolve_device
from flwr_regs.client.train.task import Task, uncompiled
from flwr_regs.cohort.batch_plan import Batch, CannotStack, Plan, draw, order_of, together
from flwr_regs.cohort.member_view import Kernels, View
from flwr_regs.cohort.result_check import difference
from flwr_regs.cohort.stack_groups import Group, Kind, Recipe, Recipes, Settings, member_of
from flwr_regs.cohort.stacked_training import unwritten
from flwr_regs.wire import keys
from flwr_regs.wire.errors import described
from flwr_regs.wire.parcel import Parcel

LOG = logging.getLogger("flwr")
ALONE = "no other client of the cohort is like it"
UNREAD = (
    "its model, loss or optimiser cannot be pickled, so whether others are like it is not known"
)
LARGE = (
    "two like it take more memory than a stack may: 64 MiB on a CPU, unless memory= says otherwise"
)
UNCHECKED = "no stack of two clients like it has been checked"
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
"""Layers that in a stack are grouped convolutions, which a CPU runs slowly."""
DIFFERS = "between a stack and a client alone"
SHARED = operator.attrgetter(
    *("model", "task", "optimizer", "identity"),
    *("device", "classifier", "time_budget", "save_private"),
)
"""What of a client its kind depends on; `Clients` have it in common."""


class Stacks:
    """Trains the clients of a round in stacks, as far as they can.

    Parameters
    ----------
    settings : Settings

    Attributes
    ----------
    settings
        As given.
    fallbacks : dict of str to int
        Why clients train by themselves -> how often, over all rounds.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if sys.platform == "linux":
            # glibc then keeps freed blocks of up to this size, instead of mapping them anew in each step
            torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._builds: WeakKeyDictionary[Client, tuple[Any, ...]] = WeakKeyDictionary()
        self._models: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self.fallbacks: dict[str, int] = {}
        self._training: Any = None  # whose builds these are
        self._evaluates: bool | None = None  # whether a stack tests as clients alone; None: unknown
        self._told = {ALONE}

    def train(self, asked: Sequence[Asked]) -> dict[int, Answer]:
        """Return, by partition id, what came of those clients that train in a stack; the others wait."""
        training = asked[0].message.config.get(keys.START_KEY) if asked else None
        if training != self._training:  # users change their models between trainings
            self._builds.clear()
            self._models.clear()
            self._training = training
        recipes, served = Recipes(asked), dict[int, Answer]()
        groups: dict[Hashable, Group] = {}
        number: Counter[Kind] = Counter()
        last: Sequence[Any] = ()
        for one in asked:
            try:
                recipe = recipes.of(one)
                alike = recipe, *SHARED(one.client)
                if not last or any(map(operator.is_not, alike, last)):
                    kind, last = self._kind_of(one.client, recipe), alike
                if kind.refused:
                    raise CannotStack(kind.refused)
                member = member_of(one, recipe)
                key = id(recipe), kind, member.plan.kind, member.plan.forms[0], member.form
                if (group := groups.get(key)) is None:
                    group = groups[key] = Group(member, recipe, self.settings, kind)
                group.add(member)
            except Exception as error:  # by itself it says what is wrong, if anything is
                self.note(error)
                continue
            number[kind] += 1
            if group.room < 0:
                served |= self._train(groups.pop(key))
        # large groups first: where a kind is checked, its stacks of one client train too
        for group in sorted(groups.values(), key=lambda g: -len(g.members)):
            if number[group.kind] == 1:
                unread = object in map(type, self._builds.get(group.members[0].asked.client, ()))
                self.note(CannotStack(UNREAD if unread else ALONE))
            else:
                served |= self._train(group)
        return served

    def evaluate(self, asked: Sequence[Asked]) -> dict[int, Parcel]:
        """Return, by partition id, the replies of those clients that evaluate at once; the others wait.

        They share the model as an object, as `Clients` do, evaluate the global model alone, and go through
        plain test data in order.
        """
        refused = {build for (build, *_), kind in self._kinds.items() if kind.refused}
        # also of clients that have not trained: a model that `Clients` share is one object
        models = {id(c.model) for c, build in self._builds.items() if build in refused}
        groups: dict[Any, list[tuple[Asked, Plan]]] = {}
        try:
            for one in [a for a in asked if id(a.client.model) not in models]:
                client, message = one.client, one.message
                same = id(client.model), id(client.task), id(message.records[keys.ARRAYS])
                if "personalise" not in message.config and (plan := _test_plan(client)):
                    groups.setdefault(same, []).append((one, plan))
            several = [group for group in groups.values() if len(group) > 1]
            replies = {pid: reply for group in several for pid, reply in _evaluated(group)}
            if replies and self._evaluates is None and self.settings.check is not False:
                first, *_, last = [one for one in asked if one.pid in replies]
                # the first one once more: a model that counts its calls then gives others
                if where := _unlike([first, last, first], replies):
                    LOG.warning("StackedGrid: clients evaluate one by one: %s", where)
                self._evaluates = not where
            return {} if self._evaluates is False else replies
        except Exception as error:  # whatever torch raises: by themselves they say it better
            LOG.debug("clients evaluate one by one", exc_info=error)
            return {}

    def note(self, error: Exception, clients: int = 1) -> None:
        """Count clients that train by themselves, and log the reason once: see also `tell`."""
        ours = isinstance(error, CannotStack)
        why = str(error) if ours else described(error)
        self.fallbacks[why] = self.fallbacks.get(why, 0) + clients
        if ours:
            self.tell([why])

    def tell(self, reasons: Collection[str] = ()) -> None:
        """Log those of the reasons that are not logged yet, by default of all.

        What torch or a hook raised waits until the clients have trained by themselves: if they fail then
        too, their errors say it better, with what helps.
        """
        for reason in [r for r in reasons or self.fallbacks if r not in self._told]:
            level = logging.WARNING if DIFFERS in reason else logging.INFO
            LOG.log(level, "StackedGrid: clients train one by one: %s", reason)
            self._told.add(reason)

    # who goes with whom

    def _kind_of(self, client: Client, recipe: Recipe) -> Kind:
        """Return what is known of clients like this one; raise CannotStack if they cannot stack."""
        if (build := self._builds.get(client)) is None:
            build = self._builds[client] = self._build(client, recipe)
        return self._kinds.setdefault((build, recipe.who.method, recipe.probes), Kind())

    def _build(self, client: Client, recipe: Recipe) -> tuple[Any, ...]:
        """Return what clients share that go together: terms, model, loss, optimiser, device.

        Of the model's entries, those that neither come nor stay with a client must have equal values.
        """
        model, who = client.model, client.identity
        if any(name.endswith("_orig_mod") for name, _ in model.named_modules()):
            raise CannotStack(f"{who.who} has a compiled model")
        if both := _overlapping(model):
            raise CannotStack(f"its {both[0]} and {both[1]} lie in the same memory")
        for name, part in (*model.named_parameters(), *model.named_modules()):
            if part._backward_hooks or getattr(part, "_post_accumulate_grad_hooks", None):
                raise CannotStack(f"its {name or 'model'} has a hook on its gradient")
        settings = ("time_budget", "save_private")
        if given := [s for s in settings if getattr(client, s) is not None]:
            raise CannotStack(f"{who.who} has a {given[0]}")
        on_cpu = resolve_device(client.device).type == "cpu"
        if on_cpu and any(isinstance(layer, CONVOLUTIONS) for layer in model.modules()):
            raise CannotStack("its convolutions are slower in a stack on a CPU")
        if model not in self._models:
            model.train()  # an evaluation may have left it in the other mode
            entries = model.state_dict(keep_vars=True)
            own = recipe.term.private(list(entries))
            loaded = [v for n, v in entries.items() if n in recipe.arrays or n in own]
            self._models[model] = Build(loaded).of(model)
        called = Build().of([*vars(client.task).values(), client.optimizer])
        kinds = who.who, who.method, tuple(who.terms), who.keeps_optimizer
        return kinds, self._models[model], called, str(client.device), client.classifier

    # training

    def _train(self, group: Group) -> dict[int, Answer]:
        """Train a group; if that fails, or its result is not that of clients alone, none of it."""
        try:
            self._check_result(group)
            if self.settings.compile:
                group.view.compiled = group.recipe.config.get(keys.START_KEY), _step_of(group.view)
            return group.replies(group.run())
        except Exception as error:  # whatever torch or a hook raises under vmap
            self.note(error, len(group.members))
            return {}

    def _check_result(self, group: Group) -> None:
        """Compare a stack's result with that of clients alone, if it is due; raise CannotStack."""
        kind, config, often = group.kind, group.recipe.config, self.settings.check
        training, this_round = config.get(keys.START_KEY), int(config[keys.ROUND_KEY])
        if kind.refused:
            raise CannotStack(kind.refused)
        if often is False:
            return
        equal = len({(len(m.plan), m.planned_steps) for m in group.members}) == 1
        one = len(group.members) == 1
        known = [at for alike, at in kind.checked.items() if one or alike == equal]
        if any(of == training and this_round < due for of, due in known):
            return
        if one:
            raise CannotStack(LARGE if group.room < 0 else UNCHECKED)
        if where := difference(group):
            kind.refused = f"{where} {DIFFERS}: see docs/stacked.md"
            raise CannotStack(kind.refused)
        kind.checked[equal] = training, math.inf if often == "first" else this_round + often


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
            if id(value) in self._by_form:
                return form
            data = value.detach().cpu().flatten().view(torch.uint8).numpy()
            return *form, hashlib.blake2b(data.tobytes()).digest()
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return value.__code__, value.__defaults__, value.__kwdefaults__, cells
        if isinstance(value, MethodType):  # pickle takes what has its name
            return value.__func__, value.__self__
        if isinstance(value, type | CodeType | ModuleType | BuiltinFunctionType):
            self._objects.append(value)
            return len(self._objects)
        return None


def _overlapping(model: nn.Module) -> tuple[str, str] | None:
    """Return a parameter of a model, and another entry in the same memory: a step of one moves both."""
    buffers = dict(model.named_buffers())
    entries = {**dict(model.named_parameters()), **buffers}.items()
    dense = [(n, t) for n, t in entries if t.numel() and t.layout == torch.strided]
    spans = sorted((t.data_ptr(), t.nbytes, name) for name, t in dense)
    for (begin, size, one), (after, _, other) in itertools.pairwise(spans):
        if begin + size > after and not {one, other} <= buffers.keys():
            return one, other
    return None


def _step_of(view: View) -> Hashable:
    """Return what a compiled step depends on beside its arguments, as the model and the loss are now.

    None if that cannot be known.
    """
    model = view.model.train()
    built = Build((*model.parameters(), *model.buffers())).of([model, *vars(view.task).values()])
    return (built, str(view.device), view.precision) if isinstance(built, tuple) else None


# evaluation


def _test_plan(client: Client) -> Plan | None:
    """Return the batches of a client's test data; None if they are not plain ones in order."""
    if client.eval_data is None or client.identity.private:
        return None
    pairs = client.task.pairs(client.eval_data)
    order = order_of(pairs)
    plain = order is not None and not order.shuffle
    return draw(pairs, torch.Generator(), order) if plain else None


def _evaluated(group: Sequence[tuple[Asked, Plan]]) -> Iterator[tuple[int, Parcel]]:
    """Yield (partition id, reply) of clients that evaluate one model; none if it is not the global one."""
    first, _ = group[0]
    client, model = first.client, uncompiled(first.client.model)
    term, *_ = evaluated(first.message, first.memory, model, client.identity)
    if term.personalising or term.private(list(model.state_dict())):
        return
    device = resolve_device(client.device)
    model.to(device).eval()
    held = [*model.parameters(), *model.buffers()]
    with restored(model, client.task.loss_fn), unwritten("buffers", held):
        for places, batches in together([plan for _, plan in group], device):
            some = [group[place] for place in places]
            for (one, plan), score in zip(some, _scores(client.task, model, batches), strict=True):
                metrics = {"num-examples": sum(plan.sizes), **score}
                begun = memories.latest(one.memory, one.message.config)
                entries = reply_entries(one.message.config, begun)
                yield one.pid, Parcel({}, entries, metrics)
        if any(map(operator.is_not, held, [*model.parameters(), *model.buffers()])):
            raise CannotStack("its model replaces its buffers")


def _unlike(some: Sequence[Asked], replies: Mapping[int, Parcel]) -> str:
    """Return which metric of a stack's evaluation differs from that of clients alone; "" if none."""
    with restored(uncompiled(some[0].client.model)):
        for one in some:
            alone: Any = evaluate(one.client, one.message, one.memory).reply.metrics
            stacked: Any = replies[one.pid].metrics
            for name, value in alone.items():
                # an example between two classes may go to either
                slack = 1e-3 * abs(value) + (name == "accuracy") * 1.5 / alone["num-examples"]
                if abs(stacked[name] - value) > slack:
                    return f"'{name}' differs {DIFFERS}: {stacked[name]:.4g} and {value:.4g}"
    return ""


@torch.no_grad()
def _scores(task: Task, model: nn.Module, batches: Sequence[Batch]) -> list[dict[str, float]]:
    """Return each client's metrics: see :func:`.personal.means`."""

    def one(leaves: Any) -> dict[str, Tensor]:
        pairs = [batch.rebuilt(parts) for batch, parts in zip(batches, leaves, strict=True)]
        return means(model, pairs, task)[0]

    misread: list[Tensor] = []
    with Kernels(products=False, misread=misread):
        metrics = vmap(one)([batch.leaves for batch in batches])
    if misread and torch.stack(misread).any():
        raise CannotStack("an embedding or one_hot gets an index that is out of range")
    each = zip(*(of_all.tolist() for of_all in metrics.values()), strict=True)
    return [dict(zip(metrics, values, strict=True)) for values in each]
