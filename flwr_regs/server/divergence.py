"""Signs that a training diverges: the client behind it is left out, or a warning, or the training's end.

Before the model moves, the guard looks for a client whose reply does not belong to its cohort's:

- its update, an array of its upload, or of its reply in the first exchange, or its change of a buffer is
  over 1,000 times as long as the cohort's median, or beyond the term's own `tolerance`. Zeros do not count
  for the median, and there must be three others than zero;
- a variance of BatchNorm is negative;
- the mean ``Σ ω_k Δ_k``, of which the terms make the step, is over 1,000 times as long as the median of the
  last five, and the client's share ``ω_k Δ_k`` is longer than those of all others together.

``on_divergence="exclude"`` leaves it out, names it, and makes the step again: nothing of it reaches the
model or a server slot. Two signs have no single client behind them, and are warned of:

- the global step is over 1,000 times the median of the last five, or, for the second time among six steps,
  over 10 times;
- the training loss is over 3 times that of the first round: the median over the clients, so that no single
  client's word counts.

Steps and means are measured over the trained parameters as one vector. A long one counts only if it is long
in units of the learning rate too (a schedule may start again), and longer than the first: near convergence,
where the steps are next to nothing, ten times as much is no harm. Zeros are passed over.

Under `privacy`, and with another aggregator than `Mean`, single clients are not compared: clipping and
noise, or the aggregator, bound what each can do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import median, median_low
from typing import Any

import numpy as np

from flwr_regs.abilities import Checks, Steps
from flwr_regs.chain import Chain
from flwr_regs.server.aggregate.aggregators import Mean
from flwr_regs.server.aggregate.updates import Moves, Updates, mean_delta
from flwr_regs.server.client_metrics import usable
from flwr_regs.server.failures import UnusableReplies
from flwr_regs.server.options import Options
from flwr_regs.server.round import Round, RoundFailed
from flwr_regs.server.snapshots import Snapshots
from flwr_regs.term import DECAY, NOT_NEGATIVE, Slot
from flwr_regs.wire.arrays import statistics
from flwr_regs.wire.pieces import square_sum

LOG = logging.getLogger("flwr")
LAST = 5
Length = tuple[float, float]
"""Of a step or a mean, and of the same in units of the learning rate."""
FAR, STEPS, LOSS = 1000.0, 10.0, 3.0
"""How many times the median of the cohort or of the last steps, of the last steps twice, and the first
round's loss, are too much."""


class DivergenceGuard(Snapshots):
    """Applies ``on_divergence`` to one training: see the top of this file.

    Parameters
    ----------
    options : Options
    method : str
        The training's name in warnings.
    """

    kept = ("steps", "means", "count", "long", "first_loss", "warned")

    def __init__(self, options: Options, method: str) -> None:
        self._options, self._method = options, method
        self._compares = options.privacy is None and isinstance(options.aggregator, Mean)
        self.steps: list[Length] = []  # of the first step that is not zero, and of the last five
        self.means: list[Length] = []  # the same of ``Σ ω_k Δ_k``, of which terms make a step
        self._mean: Length = (0.0, 0.0)  # of the step that is being made
        self.count = 0  # steps that were not zero
        self.long: list[int] = []  # the numbers of the last two long ones among them
        self.first_loss: float | None = None
        self.warned = False

    def check_uploads(
        self, this_round: Round, uploads: Mapping[int, Slot], what: str = "upload"
    ) -> None:
        """Raise UnusableReplies for clients whose uploads, by partition id and term, are too long."""
        checks = {t.name: t for t in self._options.term.terms if isinstance(t, Checks)}
        norms: dict[tuple[str, str], dict[int, float]] = {}
        times: dict[str, dict[int, float]] = {}
        for pid, upload in uploads.items() if self._compares else ():
            for name, slot in upload.items():
                if name in checks:
                    bound = checks[name].tolerance(slot, this_round.lr)
                    times.setdefault(name, {})[pid] = bound
                for key, a in slot.items():
                    if np.asarray(a).dtype.kind == "f":
                        norms.setdefault((name, key), {})[pid] = math.sqrt(square_sum(a))
        wrong: dict[int, str] = {}
        for (name, key), lengths in norms.items():
            wrong |= beyond(lengths, f"{what} '{key}' of '{name}'", times.get(name, {}))
        self._leave_out(this_round, wrong)

    def mean(self, this_round: Round, updates: Updates) -> dict[str, np.ndarray]:
        """Return the weighted sums of the updates; raise UnusableReplies as above."""
        base, replies = updates.base, updates.replies
        squares: dict[str, dict[int, float]] = {}
        means = mean_delta(updates, squares)
        norms = {p: math.sqrt(sum(squares[n][p] for n in updates.trained)) for p in replies}
        wrong = beyond(norms, "update")
        for name in base.keys() & updates.fixed:
            if base[name].dtype.kind == "f":
                changes = {p: math.sqrt(square) for p, square in squares[name].items()}
                wrong |= beyond(changes, f"change of '{name}'")
        pids = list(replies)
        for name in [n for n in statistics(base) if n.endswith("running_var")]:
            variances = Moves(name, base[name], replies).read(pids) + base[name].reshape(-1)
            negative = [pid for pid, row in zip(pids, variances, strict=True) if (row < 0).any()]
            wrong |= dict.fromkeys(negative, f"its '{name}' holds a negative variance")
        self._leave_out(this_round, wrong)
        length = math.sqrt(sum(square_sum(means[n]) for n in updates.trained))
        self._mean = length, length / (this_round.lr or 1.0)
        shares = {p: abs(updates.scaled[p]) * norm for p, norm in norms.items()}
        longest = max(shares, key=shares.__getitem__)
        alone = len(shares) > 1 and 2 * shares[longest] > sum(shares.values())
        if alone and is_long([*self.means, self._mean], FAR):
            usual = median(a for a, _ in self.means[-LAST:])
            text = (
                f"with its update, the clients' mean is {self._mean[0]:.3g} long, over {FAR:g} times the "
                f"median of the last {LAST} ({usual:.3g})"
            )
            self._leave_out(this_round, {longest: text})
        return means

    def watch(self, this_round: Round, square: float) -> None:
        """Judge a round by the squared length of its step (of the trained arrays), before the model moves.

        The first sign is logged, and is the history's ``"divergence"`` of that round. Under ``privacy=``
        the clients' losses are not read: they get no noise, and the end of a training would tell of them.

        Raises RoundFailed at every sign if ``on_divergence="stop"``.
        """
        loss = None if self._options.privacy is not None else _usual_loss(this_round)
        sign = self.look(math.sqrt(square), this_round.lr, loss)
        note(self.means, self._mean)
        if sign:
            likely = ", or ".join(suspects(self._options.term, this_round.config, this_round.lr))
            self._tell(this_round, f" looks like divergence: {sign}; try a smaller {likely}")

    def look(self, length: float, lr: float | None, loss: float | None) -> str:
        """Note a step; return the sign that it shows, or "".

        Parameters
        ----------
        length : float
            ``‖w_{t+1} − w_t‖``.
        lr : float, optional
            The clients' learning rate η; None if only they know it.
        loss : float, optional
            The training loss; None if it is not known. It is compared with the first positive one.
        """
        steps = [*self.steps, (length, length / (lr or 1.0))]
        note(self.steps, steps[-1])
        if length > 0:
            self.count += 1
            far, again = is_long(steps, FAR), ""
            if len(steps) > LAST and is_long(steps, STEPS):
                self.long = [*self.long[-1:], self.count]
                again = "for the second time " * (
                    self.long[-1] - self.long[0] in range(1, LAST + 1)
                )
            if far or again:
                usual = median(a for a, _ in steps[-LAST - 1 : -1])
                return (
                    f"{'' if far else again}the global step is over {FAR if far else STEPS:g} times the "
                    f"median of the last {LAST} ({length:.3g} against {usual:.3g})"
                )
        if loss is None:
            return ""
        if self.first_loss is None and 0 < loss < math.inf:
            self.first_loss = loss
        if self.first_loss is not None and loss > LOSS * self.first_loss:
            return (
                f"the training loss is over {LOSS:g} times the first round's ({loss:.3g} against "
                f"{self.first_loss:.3g})"
            )
        return ""

    def _leave_out(self, this_round: Round, wrong: Mapping[int, str]) -> None:
        """Raise UnusableReplies for these clients, with the reasons; only warn, or stop, if told so."""
        if not wrong:
            return
        text = "; ".join(f"client {pid}: {why}" for pid, why in sorted(wrong.items()))
        if self._options.on_divergence != "exclude":
            self._tell(this_round, f": {text}")
            return
        _note_event(this_round, text)
        raise UnusableReplies(wrong)

    def _tell(self, this_round: Round, text: str) -> None:
        """Warn of a training's first sign, in log and history; raise RoundFailed at each if told so."""
        stop = self._options.on_divergence == "stop"
        if self.warned and not stop:
            return
        self.warned = True
        text = f"round {this_round.number} of {self._method}{text}"
        _note_event(this_round, text)
        if stop:
            raise RoundFailed(
                f"{text} (on_divergence='stop': `strategy.arrays` is the model before this round)"
            )
        LOG.warning("%s", text)


def _note_event(this_round: Round, text: str) -> None:
    """Put a text behind those that the round's event has already."""
    texts = [this_round.events.get("divergence", ""), text]
    this_round.events["divergence"] = "; ".join(filter(None, texts))


def beyond(
    norms: Mapping[int, float], what: str, times: Mapping[int, float] | None = None
) -> dict[int, str]:
    """Return why, by partition id, for norms over 1,000 times their median, the lower one.

    `times` are other bounds, by partition id.

    Zeros do not count: where most clients send none, those that do are not compared with them.
    """
    others = [norm for norm in norms.values() if norm > 0]
    if len(others) < 3:
        return {}
    usual = median_low(others)
    bounds = dict.fromkeys(norms, FAR) | dict(times or {})
    return {
        pid: f"its {what} is {norm:.3g} long, over {bounds[pid]:g} times its cohort's median ({usual:.3g})"
        for pid, norm in norms.items()
        if norm > bounds[pid] * usual
    }


def is_long(lengths: Sequence[Length], times: float) -> bool:
    """Whether the last is over `times` the median of the five before, and longer than the first."""
    before, last = lengths[:-1], lengths[-1]
    return bool(before) and all(
        last[unit] > max(times * median(a[unit] for a in before[-LAST:]), before[0][unit])
        for unit in (0, 1)
    )


def note(lengths: list[Length], last: Length) -> None:
    """Append a length that is not zero; keep the first and the last five."""
    if last[0] > 0:
        lengths.append(last)
        del lengths[1:-LAST]


def suspects(term: Chain, config: Mapping[str, Any], lr: float | None) -> list[str]:
    """Return what is most often too large, with its value, and makes shorter steps if it is smaller.

    That is of each term its learning rate, and its first hyper-parameter if that is a strength, which is
    gone at 0; and the clients' learning rate and momentum.
    """
    likely = []
    for t in term.terms:
        numbers = {f.name: v for f in fields(t) if _is_number(v := getattr(t, f.name))}
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
    numbers = [loss if usable(loss) else math.inf for loss in losses if _is_number(loss)]
    return float(median(numbers)) if 2 * len(numbers) > len(losses) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
