"""The seam: a `Term` is one part of a federated optimisation method. chain.py composes several.

A method transforms gradients in two places, a client's step and the server's step, and defines what the
two sides send each other. This file is plain Python over arrays: torch tensors on a client, numpy arrays
on the server, batched tensors under ``torch.func.vmap``. It imports neither flwr nor torch. What hooks may
read is in hook_contexts.py.

State and messages live in four slots. Each is a plain ``dict`` of arrays, keyed by parameter name or by
any key that the term needs: the server keeps **server** between rounds; the server sends **broadcast** to
the clients beside the global model; a client sends **upload** beside its own model; a client keeps
**client** between rounds, and it may be missing (``{}``) at any time.

`Term` has the eight hooks of most methods. What few methods need is an ability: abilities.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Self

from flwr_regs.abilities import ABILITY_OF, ON_CLIENTS
from flwr_regs.hook_contexts import Arrays as Arrays
from flwr_regs.hook_contexts import ClientContext as ClientContext
from flwr_regs.hook_contexts import Config as Config
from flwr_regs.hook_contexts import ServerContext as ServerContext
from flwr_regs.hook_contexts import ServerStep as ServerStep
from flwr_regs.hook_contexts import Slot as Slot
from flwr_regs.hook_contexts import changed as changed
from flwr_regs.hook_contexts import mean_of_slots as mean_of_slots


class ParameterError(ValueError):
    """A hyper-parameter of a wrong type or out of range; the text names its method and what is expected.

    Its arguments are the owner, the parameter's name, what is expected, and the value.
    """

    def __str__(self) -> str:
        owner, name, expected, value = self.args
        return f"{owner}: {name} must be {expected}, not {value!r}"

    def of(self, owner: str) -> ParameterError:
        """Return the same error of another owner."""
        return ParameterError(owner, *self.args[1:])


@dataclass(frozen=True)
class Range:
    """The values that a hyper-parameter may have, finite numbers or words: named, and as a condition.

    Attributes
    ----------
    expected : str
        The words, as they stand in an error behind "must be".
    good : callable
        ``good(value) -> bool``.
    kind : type
        ``Real``, ``Integral``, ``bool`` or ``str``. A bool is no number.
    """

    expected: str
    good: Callable[[Any], bool] = lambda _: True
    kind: type = Real

    def fits(self, value: Any) -> bool:
        """Return whether a value is one of them."""
        right = isinstance(value, self.kind) and isinstance(value, bool) == (self.kind is bool)
        return right and (self.kind is str or _is_finite(value)) and self.good(value)

    def check(self, owner: str, name: str, value: Any, optional: bool = False) -> None:
        """Raise ParameterError if `value`, the parameter `name` of `owner`, is none of them.

        None passes if the parameter is `optional`.
        """
        if not (optional and value is None) and not self.fits(value):
            raise ParameterError(owner, name, self.expected + ", or None" * optional, value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int above the largest float
        return False


Ranges = Mapping[str, Range]
"""Field -> the values that it may have."""
WHOLE = Range("a whole number of at least 0", lambda v: v >= 0, Integral)
NOT_NEGATIVE = Range("a number of at least 0", lambda v: v >= 0)
POSITIVE = Range("a positive number", lambda v: v > 0)
DECAY = Range("a number from 0 to below 1", lambda v: 0 <= v < 1)
SHARE = Range("a number from 0 to 1", lambda v: 0 <= v <= 1)
FRACTION = Range("a number above 0, up to 1", lambda v: 0 < v <= 1)
COUNT = Range("a whole number of at least 1", lambda v: v >= 1, Integral)
SWITCH = Range("True or False", kind=bool)


def one_of(*words: str) -> Range:
    """Return the range of a hyper-parameter that is one of these words."""
    return Range(" or ".join(map(repr, words)), lambda v: v in words, str)


def plain_number(value: Any) -> Any:
    """Return a single number of numpy or torch as Python's, which can be sent; else the value."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def plain_numbers(owner: Any) -> None:
    """Make single numbers of numpy or torch in a dataclass's fields Python's."""
    for f in fields(owner):
        object.__setattr__(owner, f.name, plain_number(getattr(owner, f.name)))


def check_ranges(owner: Any) -> None:
    """Raise ParameterError for a field of a dataclass that is out of its class's `ranges`.

    None passes if it is the field's default. Numbers of numpy or torch become Python's.
    """
    plain_numbers(owner)
    for f in fields(owner):
        if f.name in owner.ranges:
            value, optional = getattr(owner, f.name), f.default is None
            owner.ranges[f.name].check(type(owner).__name__, f.name, value, optional)


CLIENT_HOOKS = ("start", "loss", "correct", "finish")


def overrides(kind: type, hook: str) -> bool:
    """Whether a class of terms has its own hook; or the method of an ability, which `Term` has not."""
    return getattr(kind, hook, None) is not getattr(Term, hook, None)


@dataclass(frozen=True)
class Term:
    """One ingredient of a method: a frozen dataclass. Every hook is the identity by default.

    Hooks are pure: they change no input and return no view of one. They call no ``.item()`` and do not
    branch on an array's value. So one file serves a Flower client, a user's own loop and a cohort stacked
    under ``torch.func.vmap``. Server hooks use only operators on arrays.

    Fields (int, float, bool or str) go into each round's config. What the class says of itself stands in
    class attributes; where it depends on a term's fields, a subclass overrides a property or a method.
    What few methods need is an ability that the class inherits too: ``class MyTerm(Term, Folds)``. Raises
    TypeError for a class that defines an ability's method without inheriting the ability.

    Attributes
    ----------
    name : str
        The term's name, in messages and slots; by default the class's. It has no dot.
    keeps : {"if-used", "always"}
        When the client slot of `finish` counts: if the server used the reply, or whenever it arrived.
    keeps_delta : bool
        `update` returns `delta` unchanged; an `update` that changes it stands right of the term that
        `Steps`.
    keeps_update : bool
        `finish` returns `delta` unchanged: what stands on the left then knows what is sent.
    reads_lr : bool
        False if no server hook reads ``ctx.lr``: then a term of the server alone needs no learning rate.
    excludes : collection of str
        Names of terms that are other versions of this one; a chain holds only one version. A mapping to the
        reason excludes terms for another reason.
    ranges : mapping of str to Range
        Field -> the values that it may have, checked when the term is built; None too, if it is the
        default. A `__post_init__` of a term's own calls this one first.
    server_only : bool
        Whether only the server runs it: it has no hook or ability of a client. Its fields do not travel.
        Derived.
    """

    name: ClassVar[str] = "identity"
    keeps: ClassVar[str] = "if-used"
    keeps_delta: ClassVar[bool] = False
    keeps_update: ClassVar[bool] = False
    reads_lr: ClassVar[bool] = True
    excludes: ClassVar[Collection[str]] = ()
    ranges: ClassVar[Ranges] = {}
    server_only: ClassVar[bool] = True

    def __init_subclass__(cls, composes: bool = False, **kwargs: Any) -> None:
        """Check a class of terms; one that `composes` terms has the methods of their abilities."""
        super().__init_subclass__(**kwargs)
        if cls.name == Term.name:
            cls.name = cls.__name__
        for field, values in cls.ranges.items():
            if not isinstance(values, Range):
                raise TypeError(
                    f"{cls.__name__}.ranges: '{field}' must have a Range, such as "
                    f"Range('a number from 0 to 5', lambda v: 0 <= v <= 5), not {values!r}"
                )
        for name, ability in ABILITY_OF.items():
            has = callable(getattr(cls, name, None))
            if has and ability not in cls.__mro__ and not composes:
                raise TypeError(
                    f"{cls.__name__} defines {name}(), but does not inherit {ability.__name__}: "
                    f"write class {cls.__name__}(Term, {ability.__name__})"
                )
        if "server_only" not in vars(cls):
            acts = any(overrides(cls, hook) for hook in CLIENT_HOOKS)
            cls.server_only = not (acts or any(ability in cls.__mro__ for ability in ON_CLIENTS))

    def __post_init__(self) -> None:
        check_ranges(self)
        object.__setattr__(self, "_checked", True)  # `chain` asks for it

    @property
    def needs(self) -> Collection[str]:
        """What the term reads in every step, and what costs.

        Some of "features", "output of <layer>", "start_output", "label_counts".
        """
        return ()

    @property
    def elementwise(self) -> bool:
        """True if `correct` treats each number of the parameters alone.

        `start`, and what slots hold under a parameter's name or ``<key>.<name>`` in its shape, is cut or
        stacked like the parameters; all else is there whole. Such a term does not call `gradient_at`.
        """
        return False

    @property
    def robust(self) -> bool:
        """True if what a client uploads reaches the server's slot and the other clients only through
        ``ctx.aggregated``, or as the client's own entry.

        A term that says what it `adds` need not say so.
        """
        return False

    def acts(self, hook: str) -> bool:
        """Return whether the term does anything in `hook`: by default, if its class overrides it.

        A term whose settings switch a hook off may say so here.
        """
        return overrides(type(self), hook)

    def config(self) -> dict[str, Any]:
        """Return ``"<name>.<field>" -> value``, without the fields that are None."""
        pairs = {f"{self.name}.{f.name}": getattr(self, f.name) for f in fields(self)}
        return {} if self.server_only else {k: v for k, v in pairs.items() if v is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the term from a round's config; raise KeyError naming a missing key."""
        keys = {f.name: f"{cls.name}.{f.name}" for f in fields(cls)}
        optional = {f.name for f in fields(cls) if f.default is None}
        if missing := [key for f, key in keys.items() if key not in config and f not in optional]:
            raise KeyError(f"the round's config lacks {missing}, which term '{cls.name}' needs")
        return cls(**{f: config[key] for f, key in keys.items() if key in config})

    # on a client

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the parameters from which the local steps start, given ``w_t``."""
        return params

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        """Return the local objective on a batch, given the plain loss `base` (a scalar)."""
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the corrected gradients, after backward and before the client's optimiser."""
        return grads

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        """Return (``v_k − w_t`` to be sent, upload slot, client slot) after the last local step."""
        return delta, {}, {}

    # on the server

    def init(self, params: Arrays) -> Slot:
        """Return the server slot before round 1; again if the first replies show that less is trained."""
        return {}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        """Return what every client of the round receives beside the global model."""
        return {}

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        """Return (server slot, step), given ``Σ ω_k (v_k − w_t)`` and the uploads by partition id.

        A term that folds gets what `fold` made in place of the uploads.
        """
        return server, delta

    def release(self, server: Slot, step: Arrays, ctx: ServerContext) -> ServerStep:
        """Return (server slot, the step that is made and sent); runs after every term's `update`."""
        return server, step
