"""Signs that a training diverges: the client behind it is left out, or a warning, or the training's end.

Before the model moves, the guard looks for a client whose reply does not belong to its cohort's:

- its update, its upload or an array of it, the same of its reply in the first exchange, or its change of a
  buffer is over 1,000 times as long as the cohort's median, or beyond the term's own `tolerance`; and over
  10 times as long as the medians of the first and of the last five rounds, so that an honest client with
  new data may teach a model that has converged. A client that took more steps than the median may send an
  update, or a change of a buffer of whole numbers, which may count steps, as many times as long, up to
  `max_scale`;
- zeros do not count for the median. Where fewer than three clients send others, the median of the last
  five rounds is in its place; without such rounds, in a cohort of two the smaller value, and for a buffer
  its own length;
- a buffer's change counts as zero if rounding makes such a one of numbers near 1. For a buffer that is
  itself no longer than that, the length of the usual update is in place of its own;
- a variance of BatchNorm is negative;
- the mean ``Σ ω_k Δ_k``, or the step that the terms make of it (a momentum, an adaptive rate, a user's
  `update`), is over 1,000 times as long as the median of the last five, and over 10 times as long as the
  first. The clients behind it are those without whom it is not, found by making the step of some of them;
  and, now that one is wanted, those whose updates are over 10 times their cohort's median.

``on_divergence="exclude"`` leaves it out, names it, and makes the step again: nothing of it reaches the
model or a server slot. If the mean or the step is as long whoever is left out, the training itself
diverges: the round fails, and all is as before it; with fewer than five steps before, that is only warned
of, since nobody knows yet how long a step is. Three signs are always only warned of:

- the global step is over 10 times the median of the last five, for the second time among six steps; or over
  1,000 times where that is no reason to refuse it;
- in the first round, over half of the clients say that their loss rose over 10 times above that of their
  first step;
- the training loss is over 3 times that of the first round: the median over the clients, so that no single
  client's word counts.

Steps and means are measured over the trained parameters as one vector. What is compared with earlier rounds
is long only if it is so in units of the learning rate too (a schedule may start again), and longer than the
first: near convergence, where the steps are next to nothing, ten times as much is no harm. Zeros are passed
over.

Under `privacy`, and with another aggregator than `Mean`, single clients are not compared, and no step is
refused: clipping and noise, or the aggregator, bound what each can do. A negative variance always is.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import compress
from statistics import median, median_low
from typing import Any

import numpy as np

from flwr_regs.abilities import Checks, Steps
from flwr_regs.chain import Chain
from flwr_regs.server.aggregate.aggregators import Mean
from flwr_regs.server.aggregate.updates import Moves, Updates, mean_delta
from flwr_regs.server.client_metrics import is_number, usable
from flwr_regs.server.failures import Reasons, StepOf, UnusableReplies, culprits
from flwr_regs.server.options import Options
from flwr_regs.server.round import Numbers, Round, RoundFailed, Slots, Snapshots
from flwr_regs.term import DECAY, NOT_NEGATIVE
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, square_sum, statistics

LOG = logging.getLogger("flwr")
BEFORE = "`strategy.arrays` is the model before it"
LAST = 5
ENOUGH = 3
"""Clients with something else than zeros, so that their median counts."""
ROUNDING = float(np.finfo(np.float32).eps)
"""Of a cohort's usual upload, or of a buffer's numbers: what is shorter bounds nobody."""
STEP, MEAN = "global step", "clients' mean"
Length = tuple[float, float]
"""Of what was measured, and of the same in units of the learning rate."""
Lengths = tuple[Length, ...]
"""The first that was not zero, and the last five."""
FAR, STEPS, LOSS = 1000.0, 10.0, 3.0
"""How many times the median of the cohort or of the last steps, of the last steps twice, and the first
round's loss, are too much."""


class Diverges(Exception):
    """The clients' mean, or the global step, is far too long."""


class DivergenceGuard(Snapshots):
    """Applies ``on_divergence`` to one training: see the top of this file.

    Parameters
    ----------
    options : Options
    method : str
        The training's name in warnings.
    """

    kept = ("lengths", "usual", "count", "long", "first_loss", "warned", "let_in")

    def __init__(self, options: Options, method: str) -> None:
        self.options, self._method = options, method
        self.lengths: dict[str, Lengths] = {}  # what was measured -> its lengths
        self.usual: dict[str, Length] = {}  # the same of this round, until its step is made
        self.count = 0  # steps that were not zero
        self.long: list[int] = []  # the numbers of the last two long ones among them
        self.first_loss: float | None = None
        self.warned = False
        # the clients whose updates are over 10 times their cohort's median
        self.far: list[int] = []
        self.let_in = 0  # the round of the last step that is long, and of no single client

    @property
    def _compares(self) -> bool:
        """Whether it compares single clients."""
        return self.options.privacy is None and isinstance(self.options.aggregator, Mean)

    def check_uploads(self, this_round: Round, uploads: Slots, what: str = "upload") -> None:
        """Raise UnusableReplies for clients whose uploads, by partition id and term, are too long."""
        checks = {t.name: t for t in self.options.term.able(Checks)}
        squares: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        times: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for pid, upload in uploads.items() if self._compares else ():
            for name, slot in upload.items():
                if name in checks:
                    times[name][pid] = checks[name].tolerance(slot, this_round.lr)
                for key, a in slot.items():
                    if np.asarray(a).dtype.kind == "f":
                        of_all, square = squares[name, ""], square_sum(a)
                        squares[name, key][pid] = square
                        of_all[pid] = of_all.get(pid, 0.0) + square
        wrong: Reasons = {}
        for (name, key), of_each in squares.items():
            which = f"{what} '{key}' of '{name}'" if key else f"{what} of '{name}'"
            # the moments of a bias before BatchNorm, for instance, are rounding alone
            noise = ROUNDING**2 * median_low(squares[name, ""].values())
            beyond = self._beyond(this_round, which, of_each, times[name])
            wrong |= {pid: why for pid, why in beyond.items() if of_each[pid] > noise}
        self._leave_out(this_round, wrong)

    def check_variances(self, this_round: Round, base: Mapping[str, np.ndarray]) -> None:
        """Raise UnusableReplies for clients with a negative variance; `base` is ``w_t``."""
        wrong: Reasons = {}
        pids = list(this_round.used)
        for name in [n for n in statistics(base) if n.endswith("running_var")]:
            moves = Moves(name, base[name], this_round.used).read(pids)
            negative = compress(pids, (moves + base[name].reshape(-1) < 0).any(axis=1))
            wrong |= dict.fromkeys(negative, f"its '{name}' holds a negative variance")
        self._leave_out(this_round, wrong)

    def mean(self, this_round: Round, updates: Updates, compares: bool = True) -> NDArrays:
        """Return the weighted sums of the updates.

        Raises UnusableReplies for clients that are too far from the others, if it `compares` them, and
        Diverges.
        """
        base = updates.base
        squares: dict[str, dict[int, float]] = {}
        means = mean_delta(updates, squares)
        if compares:
            of_all = {p: sum(squares[n][p] for n in updates.trained) for p in updates.replies}
            usual = median_low([s for s in of_all.values() if s > 0] or [0.0])
            self.far = [p for p, square in of_all.items() if square > STEPS**2 * usual]
            bounds = self._bounds(this_round, of_all)
            wrong = self._beyond(this_round, "update", of_all, bounds)
            for name in base.keys() & updates.fixed:
                if (kind := base[name].dtype.kind) in "fiu":
                    given, what = math.sqrt(square_sum(base[name])), f"change of '{name}'"
                    times = {} if kind == "f" else bounds  # whole numbers may count steps
                    eps = np.finfo(base[name].dtype).eps if kind == "f" else 0.0
                    noise = min(eps, ROUNDING) ** 2 * base[name].size
                    real = {p: s * (s > noise) for p, s in squares[name].items()}
                    # such as a mean behind BatchNorm
                    if real != squares[name] and given**2 <= noise:
                        given = math.sqrt(usual)
                    wrong |= self._beyond(this_round, what, real, times, given)
            self._leave_out(this_round, wrong)
        square = sum(square_sum(means[n]) for n in updates.trained)
        self.limit(this_round, MEAN, square, updates.replies)
        return means

    def _bounds(self, this_round: Round, pids: Iterable[int]) -> Numbers:
        """Return how many times as long as usual a client's update may be: it may take more steps."""
        steps = {p: reply.steps[0] for p, reply in this_round.used.items() if reply.steps}
        usual = max(median_low(steps.values()), 1) if steps else 1
        most = self.options.max_scale
        return {p: FAR * min(max(steps.get(p, 1) / usual, 1.0), most) for p in pids}

    def limit(self, this_round: Round, what: str, square: float, pids: Iterable[int]) -> None:
        """Raise Diverges if the mean or the step that these clients make is too long."""
        length = math.sqrt(square)
        last, before = (length, length / (this_round.lr or 1.0)), self.lengths.get(what, ())
        if what == MEAN:
            self.usual[what] = last
        bound = max(self._bounds(this_round, pids).values())
        if not self._compares or self.let_in == this_round.number:
            return
        if is_long([*before, last], bound) and length > STEPS * before[0][0]:
            over = f"over {bound:g} times the median of the last {LAST} ({_usual(before):.3g})"
            raise Diverges(f"the {what} is {length:.3g} long, {over}")

    def behind(self, this_round: Round, text: str, again: StepOf[None]) -> Reasons:
        """Return which clients to leave out, and why, because the mean or the step is too long.

        None if it is let in, with a warning. `again` makes the step of some clients, and raises Diverges if
        that is too long. Raises RoundFailed if no client is behind it, and at every sign if told so.
        """
        excludes = self.options.on_divergence == "exclude"
        found = {*self.far, *culprits(this_round.used, again, text)}
        wrong = dict.fromkeys(sorted(found), f"with its reply, {text}")
        if wrong and excludes:
            _note_event(this_round, _named(wrong))
            return wrong
        likely = self._likely(this_round)
        text = _named(wrong) or f"it diverges: {text}, whoever is left out; {likely}"
        if excludes and self.count >= LAST:
            text = f"round {this_round.number} of {self._method}: {text}"
            _note_event(this_round, text)
            raise RoundFailed(f"{text}; on_divergence='warn' lets it in ({BEFORE})")
        self._tell(this_round, f": {text}")
        self.let_in = this_round.number
        return {}

    def _beyond(
        self, this_round: Round, what: str, squares: Numbers, times: Numbers, given: float = 0.0
    ) -> Reasons:
        """Return why, by partition id, for what is too long; `squares` are the squares of its lengths.

        `times` are other bounds than 1,000, by partition id. `given` is the length to compare with where
        nothing else is known.
        """
        norms = {pid: math.sqrt(square) for pid, square in squares.items()}
        bounds = {**dict.fromkeys(norms, FAR), **times}
        others, before = [n for n in norms.values() if n > 0], self.lengths.get(what, ())
        lr, whose = this_round.lr or 1.0, "its cohort's median"
        if before and len(others) < ENOUGH:
            usual, whose = _usual(before), f"the median of the last {LAST} rounds"
            far = [p for p, n in norms.items() if is_long([*before, (n, n / lr)], bounds[p])]
        else:
            usual = median_low(others) if len(others) >= min(ENOUGH, len(norms)) else given
            far = [p for p, n in norms.items() if n > bounds[p] * usual > 0]
        # before a model converges, or after a schedule began low
        ordinary = STEPS * max((length for length, _ in before), default=0.0)
        far = [p for p in far if bounds[p] < FAR or norms[p] > ordinary]
        if good := [n for p, n in norms.items() if n > 0 and p not in far]:
            self.usual[what] = median_low(good), median_low(good) / lr
        over = {p: f"its {what} is {norms[p]:.3g} long, over {bounds[p]:g} times" for p in far}
        return {p: f"{text} {whose} ({usual:.3g})" for p, text in over.items()}

    def watch(self, this_round: Round, square: float) -> None:
        """Judge a round by the squared length of its step (of the trained arrays), before the model moves.

        Raises Diverges for one that is refused.

        The first sign is logged, and is the history's ``"divergence"`` of that round. Under ``privacy=``
        the clients' losses are not read: they get no noise, and the end of a training would tell of them.

        Raises RoundFailed at every sign if ``on_divergence="stop"``.
        """
        self.limit(this_round, STEP, square, this_round.used)
        begins, private = not self.count, self.options.privacy is not None
        loss = None if private else _usual_loss(this_round)
        sign = self.look(math.sqrt(square), this_round.lr, loss)
        rose = [reply.says(keys.LOSS_ROSE) for reply in this_round.came.values()]
        if begins and not private and 2 * sum(rose) > len(rose):
            whose = f"{sum(rose)} of {len(rose)} clients"
            rise = f"the loss of {whose} rose to over {STEPS:g} times that of their first step"
            sign = sign or rise
        if sign:
            likely = self._likely(this_round)
            self._tell(this_round, f" looks like divergence: {sign}; {likely}")

    def look(self, length: float, lr: float | None, loss: float | None) -> str:
        """Note a step, and what else the round has measured; return the sign that the step shows, or "".

        Parameters
        ----------
        length : float
            ``‖w_{t+1} − w_t‖``.
        lr : float, optional
            The clients' learning rate η; None if only they know it.
        loss : float, optional
            The training loss; None if it is not known. It is compared with the first positive one.
        """
        steps = *self.lengths.get(STEP, ()), (length, length / (lr or 1.0))
        of_round = {**self.usual, STEP: steps[-1]}
        now = {what: noted(self.lengths.get(what, ()), last) for what, last in of_round.items()}
        self.lengths, self.usual = {**self.lengths, **now}, {}
        if length > 0:
            self.count += 1
            far, again = is_long(steps, FAR), ""
            if len(steps) > LAST and is_long(steps, STEPS):
                self.long = [*self.long[-1:], self.count]
                again = "for the second time " * (0 < self.long[-1] - self.long[0] <= LAST)
            if far or again:
                over = f"over {FAR if far else STEPS:g} times the median of the last {LAST}"
                usual = f"{length:.3g} against {_usual(steps[:-1]):.3g}"
                return f"{'' if far else again}the global step is {over} ({usual})"
        if self.first_loss is None and 0 < (loss or 0) < math.inf:
            self.first_loss = loss
        if loss is not None and loss > LOSS * (first := self.first_loss or math.inf):
            over = f"the training loss is over {LOSS:g} times the first round's"
            return f"{over} ({loss:.3g} against {first:.3g})"
        return ""

    def _likely(self, this_round: Round) -> str:
        likely = suspects(self.options.term, this_round.config, this_round.lr)
        return f"try a smaller {', or '.join(likely)}"

    def _leave_out(self, this_round: Round, wrong: Mapping[int, str]) -> None:
        """Raise UnusableReplies for these clients, with the reasons; only warn, or stop, if told so."""
        if wrong and self.options.on_divergence == "exclude":
            _note_event(this_round, _named(wrong))
            raise UnusableReplies(wrong)
        if wrong:
            self._tell(this_round, f": {_named(wrong)}")

    def _tell(self, this_round: Round, text: str) -> None:
        """Warn of a training's first sign, in log and history; raise RoundFailed at each if told so."""
        stop = self.options.on_divergence == "stop"
        if self.warned and not stop:
            return
        self.warned = True
        text = f"round {this_round.number} of {self._method}{text}"
        _note_event(this_round, text)
        if stop:
            raise RoundFailed(f"{text} (on_divergence='stop': {BEFORE})")
        LOG.warning("%s", text)


def _named(wrong: Mapping[int, str]) -> str:
    return "; ".join(f"client {pid}: {why}" for pid, why in sorted(wrong.items()))


def _note_event(this_round: Round, text: str) -> None:
    """Put a text behind those that the round's event has already."""
    texts = [this_round.events.get("divergence", ""), text]
    this_round.events["divergence"] = "; ".join(filter(None, texts))


def is_long(lengths: Sequence[Length], times: float) -> bool:
    """Whether the last is over `times` the median of the five before, and longer than the first."""
    before, last = lengths[:-1], lengths[-1]
    return bool(before) and all(
        last[unit] > max(times * median(a[unit] for a in before[-LAST:]), before[0][unit])
        for unit in (0, 1)
    )


def noted(lengths: Lengths, last: Length) -> Lengths:
    """Return the lengths with the last, unless it is zero: the first of them and the last five."""
    return (*lengths[:1], *(*lengths[1:], last)[-LAST:]) if last[0] > 0 else lengths


def _usual(before: Lengths) -> float:
    return median(length for length, _ in before[-LAST:])


def suspects(term: Chain, config: Mapping[str, Any], lr: float | None) -> list[str]:
    """Return what is most often too large, with its value, and makes shorter steps if it is smaller.

    That is of each term its learning rate, and its first hyper-parameter if that is a strength, which is
    gone at 0; and the clients' learning rate and momentum.
    """
    likely = []
    for t in term.terms:
        numbers = {f.name: v for f in fields(t) if is_number(v := getattr(t, f.name))}
        if not numbers and isinstance(t, Steps):
            likely.append(f"learning rate of the '{t.name}'")
        first = next(iter(numbers), "")
        strengths = {first} if t.ranges.get(first) in (NOT_NEGATIVE, DECAY) else set[str]()
        strengths |= {"lr", "server_lr"}
        likely += [f"{t.name}.{n} ({v:g})" for n, v in numbers.items() if v > 0 and n in strengths]
    likely.append("lr" if lr is None else f"lr ({lr:g})")
    if momentum := config.get("momentum"):
        likely.append(f"momentum ({momentum:g})")
    return likely


def _usual_loss(this_round: Round) -> float | None:
    """Return the median of the used replies' training losses; None if under half of them have a number."""
    losses = [reply.metrics.get("train-loss") for reply in this_round.used.values()]
    numbers = [loss if usable(loss) else math.inf for loss in losses if is_number(loss)]
    return float(median(numbers)) if 2 * len(numbers) > len(losses) else None
