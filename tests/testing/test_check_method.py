"""check_method passes a right method, and catches a wrong one for each law, by the law's name."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from flwr_regs import FedFOR, FedFORClient, FirstOrder, RegClient, RegStrategy
from flwr_regs.abilities import Recovers, Withholds
from flwr_regs.client import memory
from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot, Term
from flwr_regs.testing import LAWS, Exempt, LawBroken, Method, check_method
from tests.oracles.client_step.fedfor import fedfor
from tests.oracles.rounds import minus, plus, rounds_of


@dataclass(frozen=True)
class Anchor(Term):
    """A user's own term: ``rate/2 ‖v − w_0‖²``, a pull towards the very first model."""

    name: ClassVar[str] = "anchor"
    elementwise: ClassVar[bool] = True
    rate: float

    def init(self, params: Arrays) -> Slot:
        return {n: p.copy() for n, p in params.items()}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return server

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        first = ctx.broadcast
        return {n: g + self.rate * (params[n] - first[n]) for n, g in grads.items()}


def anchored(
    weights: Arrays, clients: Any, rounds: int, lr: Any, *, rate: float, **options: Any
) -> list[Arrays]:
    """The oracle of Anchor."""
    w, models = weights, []
    slope = options["gradient"]
    for now in rounds_of(clients, rounds, lr, **options):
        ends = {}
        for k in now.trained:
            ends[k] = w
            for x, y in now.batches(k):
                pull = minus(ends[k], weights)
                ends[k] = plus(ends[k], -now.eta, plus(slope(ends[k], x, y), rate, pull))
        w = now.mean(ends)
        models.append(w)
    return models


def of(kind: type[Term], base: type[RegStrategy] = RegStrategy) -> Callable[..., RegStrategy]:
    """A strategy of one term with one number."""
    return lambda rate=0.3, **options: base([kind(rate)], **options)  # type: ignore[call-arg]


def method(kind: type[Term] = Anchor, **settings: Any) -> Method:
    return Method(**{"strategy": of(kind), "client": None, "terms": [kind(0.3)], **settings})  # type: ignore[call-arg]


class Anchored(RegStrategy):
    """Its clients are those of AnchoredClient, which nobody names."""

    method = "anchored"

    def __init__(self, rate: float, **kwargs: Any) -> None:
        super().__init__([Anchor(rate)], **kwargs)


class AnchoredClient(RegClient):
    method = "anchored"
    terms = (Anchor,)


@pytest.mark.parametrize(
    ("strategy", "settings", "neutral"),
    [
        (Anchored, {"rate": 0.3}, {"rate": 0.0}),
        pytest.param(Anchored(0.3), None, Anchored(0.0), marks=pytest.mark.full),
    ],
    ids=["class", "instance"],
)
def test_a_users_own_method_passes(strategy: Any, settings: Any, neutral: Any) -> None:
    given = {"settings": settings, "neutral": neutral, "oracle_settings": {"rate": 0.3}}
    report = check_method(strategy, oracle=anchored, **given)
    assert list(report) == list(LAWS)
    assert report.pop("fixed-point") == "skipped: no fixed point is stated"
    assert report.pop("downlinks").startswith("skipped: no term recovers its broadcast")
    assert set(report.values()) == {"passed"}
    assert re.search(r"^oracle +passed$", str(report), re.MULTILINE)


def test_an_oracle_with_a_flipped_sign_is_found() -> None:
    with pytest.raises(LawBroken, match=r"law 'oracle/.*' .*after round 1: .*is .*expected"):
        check_method(of(Anchor), None, Anchor(0.3), anchored, oracle_settings={"rate": -0.3})


class Biased(Anchor):
    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: g + 0.01 for n, g in grads.items()}


class Keeps(Anchor):
    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        server["last"] = delta["0.weight"].copy()
        return server, delta


class Idle(Anchor):
    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return grads


class InPlace(Anchor):
    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        for n, g in grads.items():
            g += self.rate * (params[n] - ctx.broadcast[n])
        return grads


class View(Anchor):
    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {}, {n: p[:1] for n, p in ctx.start.items()}


LEFT: dict[Any, Any] = {}


class Hidden(Anchor):
    """Keeps its last update outside its slots."""

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        last = LEFT.get(ctx.client_id, delta)
        LEFT[ctx.client_id] = delta
        return {n: d + 0.1 * last[n] for n, d in delta.items()}, {}, {}


class Branches(Anchor):
    elementwise: ClassVar[bool] = False

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: g if (g > 0).all() else 0.5 * g for n, g in grads.items()}


class FirstOnly(Anchor):
    """The server moves by what the first client of the round uploaded."""

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, dict(delta), {}

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        first = next(iter(uploads.values()))
        return server, {n: np.array(first[n]) for n in delta}


class Planned(Anchor):
    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {}, {n: d / ctx.planned_steps for n, d in delta.items()}


class Normed(Anchor):
    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: g / (1 + (g**2).sum()) for n, g in grads.items()}


class Doubled(Anchor, Recovers):
    """Recovers twice what it sends."""

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return {n: s / 2 for n, s in self.recover(ctx.previous_step or {}, 1.0).items()}

    def recover(self, step: Arrays, lr: float) -> Slot:
        return {n: 1.0 * s for n, s in step.items()}

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: g + ctx.broadcast.get(n, 0.0) for n, g in grads.items()}


class LosesTheLast(RegStrategy):
    """Uses only the replies that came before the last one."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return super().aggregate_train(server_round, list(replies)[:-1])


WRONG = [
    ("neutral", "", method(Biased, neutral={"rate": 0.0}), "after round 1"),
    ("moves", "", method(Idle), "found 0 to 0"),
    ("pure", "", method(InPlace), r"InPlace\.correct .* changes '0.weight' of what"),
    ("pure", "", method(Keeps), r"in `update` changes server\['last'\] in place"),
    ("pure", "", method(View), r"its result\[2\].* shares memory with ctx.start\["),
    ("pure", "", method(Hidden), "another result the second time"),
    ("runners", "plain loop", method(Hidden), "in the plain loop, the model"),
    ("runners", "own loop", method(Hidden), "after round"),
    ("stacked", "", method(Branches), "it does not run: .*data-dependent control flow"),
    ("stacked", "", method(Normed), "it does not run: .*differs by"),
    ("state", "", method(Hidden), "after round 1"),
    ("repeated", "", method(Hidden), "after round 1"),
    ("downlinks", "", method(Doubled), "after round 2"),
    ("unused", "model", method(Hidden), "after round"),
    ("order", "clients", method(FirstOnly), "after round 1"),
    ("order", "replies", method(strategy=of(Anchor, LosesTheLast)), "after round 1"),
    ("identity", "last", method(strategy=of(Anchor, LosesTheLast)), "after round 1"),
    ("fixed-point", "", method(Idle, fixed_point=lambda *_: 0.0), "'v'.* is .*, expected 0 "),
    ("incomplete", "", method(Planned), "client 0, after 4 of 4|after 5 of 6 steps"),
]


@pytest.mark.parametrize(
    ("law", "variant", "wrong", "found"), WRONG, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_wrong_method_is_found(law: str, variant: str, wrong: Method, found: str) -> None:
    LEFT.clear()
    name = f"{law}/{variant}" if variant else law
    with pytest.raises(LawBroken, match=rf"(?s)^law '{name}' \(.*\): .*({found})"):
        LAWS[law].judge(wrong, variant)


class Keeps(Anchor):
    """Keeps its update on the client."""

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {}, dict(delta)


class Personal(Anchor, Withholds):
    def private(self, names: Any) -> set[str]:
        return {"2.weight", "2.bias"}


def test_a_method_that_withholds_entries_obeys_the_laws() -> None:
    assert LAWS["moves"].judge(method(Personal), "") == "passed"
    assert LAWS["unused"].judge(method(Personal), "model").startswith("skipped: it keeps something")


def test_a_slot_that_outlives_an_unused_reply_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LAWS["unused"].judge(method(Keeps), "slots") == "passed"

    monkeypatch.setattr(memory, "begin", lambda held, term, config, _: memory.latest(held, config))
    with pytest.raises(LawBroken, match=r"^law 'unused/slots' .*client slot of 'anchor'"):
        LAWS["unused"].judge(method(Keeps), "slots")


def test_every_law_can_be_broken() -> None:
    """The oracle's is above."""
    assert {law for law, *_ in WRONG} == LAWS.keys() - {"oracle"}


def test_an_exemption_is_checked() -> None:
    idle = Exempt("This term does nothing at all.")
    report = LAWS["moves"].judge(method(Idle, exempt={"moves": idle}), "")
    assert report == "exempt: This term does nothing at all."
    with pytest.raises(LawBroken, match=r"nothing at all.”.*meets it: leave out the exemption"):
        LAWS["moves"].judge(method(exempt={"moves": idle}), "")
    refused = Exempt("It has no such client.", refusal="no such client")

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("there is no such client here")

    own = method(client=refuse, exempt={"state": refused, "neutral": refused})
    assert LAWS["state"].judge(own, "").startswith("exempt")
    with pytest.raises(LawBroken, match="not refused with 'no such client'"):
        LAWS["moves"].judge(method(Idle, exempt={"moves": refused}), "")
    with pytest.raises(LawBroken, match="does not run; name the `refusal`: TooFewReplies"):
        LAWS["state"].judge(method(client=refuse, exempt={"state": idle}), "")


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a sentence that says why"):
        check_method(of(Anchor), None, Anchor(0.3), None, exempt={"moves": "no"})
    with pytest.raises(ValueError, match=r"exempt from \['elsewhere'\], but the laws are"):
        check_method(
            of(Anchor), None, Anchor(0.3), None, exempt={"elsewhere": "It settles somewhere there."}
        )
    with pytest.raises(TypeError, match=r"terms are instances.*, not the class"):
        check_method(of(Anchor), None, Anchor, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a strategy's instance has its settings"):
        check_method(RegStrategy([Anchor(0.3)]), None, Anchor(0.3), None, neutral={"rate": 0.0})
    with pytest.raises(ValueError, match=r"the strategy runs .*0\.3.*, not terms=.*0\.4"):
        check_method(of(Anchor), None, Anchor(0.4), None)


def test_an_oracle_that_knows_less_is_asked_less() -> None:
    def short(w: Any, clients: Any, rounds: int, lr: Any, epochs: int, weighting: str) -> Any:
        return fedfor(w, clients, rounds, lr, epochs, weighting=weighting, alpha=0.6)

    case = Method(FedFOR, FedFORClient, [FirstOrder(0.6)], short, settings={"alpha": 0.6})
    assert LAWS["oracle"].judge(case, "num-examples, epochs") == "passed"
    assert LAWS["oracle"].judge(case, "some clients") == "skipped: the oracle takes no cohorts"
