"""What one client of a stack sees under ``torch.func.vmap``: its model, its contexts. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from flwr_regs.chain import Chain
from flwr_regs.client.measure.context_functions import OVER_DATA, Measures
from flwr_regs.client.measure.fisher import fisher_diagonal
from flwr_regs.client.member import Asked
from flwr_regs.client.memory import Begun
from flwr_regs.client.train.batches import Batches, Pairs, forked, padded
from flwr_regs.client.train.optimizer import OptimizerFn
from flwr_regs.client.train.task import Task, called
from flwr_regs.cohort.batch_plan import CannotStack, Plan
from flwr_regs.term import Arrays, ClientContext, Slot

NUMBERS = ("client_id", "num_steps", "planned_steps")
"""Fields of a context that are a number of one member's own."""
DIVISIONS = ("truediv", "rdiv", "div", "divide", "true_divide", "pow", "rpow")
"""Names, without underscores, of the functions that make fractions of whole numbers."""
MISREAD = (torch.embedding, torch.index_fill, Tensor.index_fill, Tensor.index_fill_)
"""torch's functions whose indices under vmap may be of other members' rows, without an error."""


@dataclass(eq=False)
class Member:
    """One client of a stack.

    Attributes
    ----------
    plan : Plan
        The batches of its steps.
    planned_steps : int
        E; it takes ``len(plan)`` steps.
    private : Arrays
        The entries of its model that are not those of the others.
    broadcast : Slot
        The terms' broadcasts that are its own.
    label_counts : Tensor or None
    asked, begun : Asked, Begun
        Its message, and what of its memory the round begins with.
    form : hashable
        What else must be equal in one stack.
    """

    plan: Plan
    planned_steps: int
    private: Arrays
    broadcast: Slot
    label_counts: Tensor | None
    asked: Asked
    begun: Begun
    form: Hashable


class Number(Tensor):
    """A number of one member under vmap, such as its id: good to calculate with, but no key and no text.

    What it and a tensor make has the tensor's precision, as with one of Python's numbers.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the function makes of it: again such a number, if all else is plain."""
        plain = all(type(a) in (cls, int, float) for a in args)
        divides = getattr(func, "__name__", "").strip("_") in DIVISIONS or float in map(type, args)
        with torch._C.DisableTorchFunctionSubclass():
            others = [a.dtype for a in args if isinstance(a, Tensor) and type(a) is not cls]
            precise = [kind for kind in others if kind.is_floating_point]
            kind = reduce(torch.promote_types, precise or [torch.get_default_dtype()])
            if plain and any(type(a) is cls and a.device.type != "mps" for a in args):
                kind = torch.float64  # as Python calculates
            own = (type(a) is cls and (a.is_floating_point() or (plain and divides)) for a in args)
            given = [a.to(kind) if it else a for a, it in zip(args, own, strict=True)]
            result = func(*given, **(kwargs or {}))
        return result.as_subclass(cls) if plain and type(result) is Tensor else result

    def _raise(self, *_: Any) -> NoReturn:
        raise CannotStack("a term looks up a number that differs between the members")

    __hash__ = __format__ = __repr__ = __str__ = _raise  # type: ignore[assignment]


@dataclass(kw_only=True)
class View:
    """What the clients of a stack share, and what each of them sees of it; a :class:`.task.Task`, too.

    Attributes
    ----------
    model : nn.Module
        Of the clients' build. Its values do not matter, but for those that are nowhere else; they change.
    term : Chain
    task : Task
    device : torch.device
    entries : Arrays
        The model's at the round's start, by ``state_dict`` name; a member's own take precedence.
    trained : sequence of str
        The parameters that are trained; terms see those of them that `entries` has.
    make : callable
        The optimiser's factory, as the method has adapted it.
    broadcast : Slot
        The terms' slots that are the same for all.
    same : dict
        Fields of the contexts that are the same for all; a `Stack` adds to them.
    classifier : str or None
    precision : torch.dtype or None
        Of the forward pass, by torch's autocast.
    randomness : str
        "different": each member draws numbers of its own; "same": all draw the same.
    compiled : tuple or None
        (training, what else a compiled step depends on beside its arguments); None: steps are not compiled.

    A `Stack` sets the others.

    start : Arrays
        ``w_t``, what terms see of it.
    rest : Arrays
        The entries of the model that are neither trained nor a buffer nor any client's own.
    buffers : sequence of str
        The names of the model's buffers.
    as_products : bool
        Whether layers run as :class:`Kernels` has them.
    misread : list of Tensor
        For each call that :class:`Kernels` watches, whether an index was out of range. The stack reads it
        at its end, since a step must not wait for a GPU.
    taps : Taps
        On the model, while it trains.
    classes : int
        Of the model's output; 0 before the first forward pass.

    In its methods, `told` is what one client is told (fields of its contexts), and a `row` all that is its
    own: its `told`; "held", the entries that are its own or change, but are not trained; and "at_start",
    what its model held at the round's start beside what terms see.
    """

    model: nn.Module
    term: Chain
    task: Task
    device: torch.device
    entries: Arrays
    trained: Sequence[str]
    make: OptimizerFn
    broadcast: Slot
    same: dict[str, Any]
    classifier: str | None
    precision: torch.dtype | None
    randomness: str = "different"
    compiled: tuple[Hashable, Hashable] | None = None
    start: Arrays = field(default_factory=dict)
    rest: Arrays = field(default_factory=dict)
    buffers: Sequence[str] = ()
    as_products: bool = False
    misread: list[Tensor] = field(default_factory=list)
    taps: Any = None
    classes: int = 0

    def vmapped(self, one: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one member as a function of all."""
        return vmap(one, randomness=self.randomness)

    def of_all(self, hook: Callable[..., Any], told: dict[str, Any], *given: Arrays) -> Any:
        """Return what a hook makes of each member's arrays and context."""
        with torch.no_grad():
            return self.vmapped(lambda told, *own: hook(*own, self.context(told)))(told, *given)

    def pairs(self, data: Batches) -> Pairs:
        """Return a member's data as pairs: see :meth:`.task.Task.pairs`."""
        return self.task.pairs(data)

    def output(self, _: nn.Module, inputs: Any, targets: Any, values: Arrays) -> Any:
        """Return the logits of one member; `values` then hold what the forward pass has made of them."""
        given = {**self.rest, **values}
        args, kwargs = self.task.arguments(inputs, targets)
        how = self.device.type, self.precision
        cast: Any = torch.autocast(*how) if self.precision else nullcontext()
        with cast, Kernels(self.as_products, self.misread):
            output = called(self.model, given, args, kwargs)
        values.update({n: given[n] for n in values})
        return self.task.logits(output)

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Return the plain loss of one member's logits."""
        with Kernels(self.as_products, self.misread):
            return self.task.loss(output, targets)

    def context(self, told: Mapping[str, Any], **more: Any) -> ClientContext:
        """Return one member's context, under vmap."""
        own = {n: v.as_subclass(Number) if n in NUMBERS else v for n, v in told.items()}
        if "label_counts" in own:
            own["label_counts"] = padded(own["label_counts"], self.classes)
        own["broadcast"] = joined(self.broadcast, told["broadcast"])
        return ClientContext(**{**self.same, **NOT_IN_A_STACK, **own, **more})

    def at(self, row: Any, inputs: Any, targets: Any, shown: Mapping[str, Any]) -> ClientContext:
        """Return one member's context of a step, under vmap; `shown` is what the forward pass has shown."""
        logits = shown.get("output")
        if isinstance(logits, Tensor) and logits.ndim == 2:
            self.classes = logits.shape[1]
        teaches = any("start_output" in t.needs for t in self.term.terms)
        ctx = self.context(row["told"])
        return OneMember(self, row).of_step(ctx, inputs, targets, teaches, shown)

    def gradient_at(self, row: Any, ctx: Any, before: Sequence[Tensor], params: Arrays) -> Arrays:
        """Return the gradient of a step's whole loss at other parameters, with the step's dropout mask."""
        with forked(self.device):
            torch.set_rng_state(before[0])
            for state in before[1:]:
                torch.cuda.set_rng_state(state, self.device)
            return OneMember(self, row).step_gradient(self.term, ctx, self.taps, params)


class OneMember(Measures):
    """The measurements of one member under vmap.

    Parameters
    ----------
    view : View
    row : dict
        What is its own: see `View`.
    data : sequence of (inputs, targets)
        Its batches. All members have the same number of equal ones.
    **how
        The `memory` and `layers` of :func:`.fisher_diagonal`.
    """

    def __init__(self, view: View, row: Mapping[str, Any], data: Any = (), **how: Any) -> None:
        self._held, self._how = row["held"], how
        task: Any = replace(view, rest={**view.rest, **self._held})
        super().__init__(view.model, data, task, view.device, view.classifier)
        self._start, self._rest = view.start, row["at_start"]
        self._buffers = view.buffers

    def gradient(self, loss: Callable[[Arrays], Any], params: Arrays) -> Arrays:
        """Return the gradient of a function of parameters."""
        return grad(loss)(params)  # type: ignore[no-any-return]

    def call(self, inputs: Any, targets: Any, params: Arrays) -> Any:
        """Return the model's output on a batch in its present mode; its buffers stay as they are."""
        values = {n: p.to(self._dtypes.get(n, p.dtype)) for n, p in params.items()}
        held = {**self._held, **values}
        values |= {n: held[n].clone() for n in self._buffers if n in held}
        return self.task.output(self.model, inputs, targets, values)

    def fisher(self, params: Arrays, max_samples: int | None = None) -> Arrays:
        """Return the diagonal of the empirical Fisher information: see :func:`.fisher_diagonal`."""
        whole = {**self._held, **self._whole(params)}
        given = self.model, self.data, self.task, self.device, whole, max_samples
        return fisher_diagonal(*given, **self._how)


class Kernels(TorchFunctionMode):
    """Linear layers as ``W xᵀ``: under vmap, a weight's gradient then lies in memory as the weight does.

    Of ``x Wᵀ`` it is transposed, and all that is done with both takes several times as long. Whether the
    indices of embeddings and the classes of ``one_hot`` are in range is noted here: under vmap torch does
    not check it.

    Parameters
    ----------
    products : bool
        False: linear layers and the cross-entropy run as they are.
    misread : list of Tensor
        See :class:`View`; added to.
    """

    def __init__(self, products: bool, misread: list[Tensor]) -> None:
        super().__init__()
        self._products, self._misread = products, misread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        linear = self._products and func is nn.functional.linear and not kwargs
        if linear and args[0].ndim == args[1].ndim == 2:
            x, weight, bias = (*args, None)[:3]
            product = weight @ x.T
            return (product if bias is None else product + bias.unsqueeze(1)).T
        if func is nn.functional.cross_entropy:
            return _cross_entropy(self._products, *args, **kwargs)
        if func is nn.functional.embedding:
            self._misread.append(_out_of_range(args[0], len(args[1])))
            return _embedded(*args, **kwargs)
        if func is nn.functional.one_hot:
            return _one_hot(self._misread, *args, **kwargs)
        if func in MISREAD:
            raise CannotStack(f"under vmap torch's {func.__name__} may read other members' rows")
        return func(*args, **kwargs)


def _cross_entropy(quick: bool, logits: Tensor, targets: Tensor, **how: Any) -> Tensor:
    """Return a cross-entropy; the usual one in fewer operations than torch's under vmap."""
    if not targets.is_floating_point() and targets.dtype not in (torch.int64, torch.uint8):
        raise CannotStack(f"its labels are {targets.dtype}, which torch refuses outside of vmap")
    if targets.dtype == torch.uint8:  # under vmap torch takes int64 alone
        targets = targets.long()
    by_class = logits.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()
    plain = {"reduction": "mean", "label_smoothing": 0.0, "ignore_index": how.get("ignore_index")}
    usual = all(value in (None, plain.get(name)) for name, value in how.items())
    quick = quick or logits.shape[:1] == (1,)  # of each sample alone: Fisher information
    if not (quick and usual and by_class):
        return nn.functional.cross_entropy(logits, targets, **how)
    counts = targets != how.get("ignore_index", -100)
    chosen = torch.where(counts, targets, 0).unsqueeze(0)
    # torch's softmax takes many times as long over few entries of the last axis
    if len(logits) == 1:
        below = logits.T - logits.detach().amax(1)
        picked = below.gather(0, chosen).squeeze(0) - below.exp().sum(0).log()
    else:
        picked = logits.T.log_softmax(0).gather(0, chosen).squeeze(0)
    # without examples it is NaN, and its gradient 0, as in torch
    mean: Tensor = -torch.where(counts, picked, 0.0).sum() / counts.sum()
    return mean


def _embedded(indices: Tensor, weight: Tensor, padding_idx: int | None, **how: Any) -> Tensor:
    """Return an embedding. Under vmap torch forgets ``padding_idx``."""
    output = nn.functional.embedding(indices, weight, **how)
    if padding_idx is None:
        return output
    is_padding = (indices == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, output.detach(), output)


def _one_hot(misread: list[Tensor], input: Tensor, num_classes: int = -1) -> Tensor:
    """Return a vector for each class; torch's own cannot look at the numbers within a gradient."""
    if num_classes < 1 or input.dtype != torch.int64:
        return nn.functional.one_hot(input, num_classes)
    misread.append(_out_of_range(input, num_classes))
    return (input.unsqueeze(-1) == torch.arange(num_classes, device=input.device)).long()


def _out_of_range(indices: Tensor, rows: int) -> Tensor:
    """Return whether any member's indices are not from 0 to ``rows - 1``.

    Under vmap torch then reads other members' rows of an embedding, and makes a vector of zeros of a class.
    """
    indices = _plain(indices)
    return _plain(((indices < 0) | (indices >= rows)).any())


def _plain(tensor: Tensor) -> Tensor:
    """Return what a tensor under vmap holds of all members."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class AsksFor(CannotStack):
    """A term asks for a function over a client's data, whose name this holds."""

    def __str__(self) -> str:
        where = "in `finish` or `probe` alone, and not `train` beside the others"
        return f"a term asks for {self.args[0]}, which a stack has {where}"


def _raise(name: str, *_: Any, **__: Any) -> Any:
    raise AsksFor(name)


NOT_IN_A_STACK = {name: partial(_raise, name) for name in (*OVER_DATA, "train")}
"""Functions of a context over a client's whole data; in a stack `finish` and `probe` alone have them."""


def in_shape(made: Arrays, given: Arrays) -> Arrays:
    """Return what a hook made of the given arrays, each in the shape of its array; a number fills it."""

    def one(value: Any, like: Tensor) -> Any:
        value = value if isinstance(value, Tensor) else torch.full_like(like, value)
        return value.expand(like.shape)

    return {n: one(made[n], v) for n, v in given.items()}


def as_tensors(slots: Slot, device: torch.device) -> Slot:
    """Return slots with tensors in place of plain numbers, of the types that a client alone gives these."""

    def one(value: Any) -> Tensor:
        if isinstance(value, Number) and value.is_floating_point():
            return value.to(torch.get_default_dtype())
        return value if isinstance(value, Tensor) else torch.as_tensor(value, device=device)

    return {t: {key: one(value) for key, value in slot.items()} for t, slot in slots.items()}


def joined(first: Slot, second: Slot) -> Slot:
    """Return two slots by term as one."""
    return {t: {**first.get(t, {}), **second.get(t, {})} for t in {**first, **second}}
