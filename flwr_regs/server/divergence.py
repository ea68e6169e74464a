"""Signs that a training diverges, long before the model is not finite: a warning, or the training's end.

A sign is one of these:

- a global step is over 10 times the median of the last five, for the second time among six steps;
- the training loss is over 3 times that of the first round: the median over the clients, so that no single
  client's word counts.

Steps are measured over the trained parameters as one vector. A long step counts only if it is long in units
of the learning rate too (a schedule may start again), and longer than the first step: near convergence,
where the steps are next to nothing, ten times as much is no harm. Steps of zero are passed over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import fields
from statistics import median
from typing import Any

from flwr_regs.abilities import Compresses, Steps
from flwr_regs.chain import Chain
from flwr_regs.server.client_metrics import usable
from flwr_regs.server.options import Options
from flwr_regs.server.round import Round, RoundFailed
from flwr_regs.server.snapshots import Snapshots

LOG = logging.getLogger("flwr")
LAST = 5
STEPS, LOSS = 10.0, 3.0
"""How many times the median of the last steps, and the first round's loss, are too much."""


class DivergenceGuard(Snapshots):
    """Applies ``on_divergence`` to one training: see the top of this file."""

    kept = ("lengths", "long", "first_loss", "warned")

    def __init__(self) -> None:
        self.lengths: list[tuple[float, float]] = []  # of each step, and of it in units of η
        self.long: list[int] = []  # the numbers of the long steps, among those that are not zero
        self.first_loss: float | None = None
        self.warned = False

    def look(self, length: float, lr: float | None, loss: float | None) -> str:
        """Return the sign that the next round shows, or "".

        Parameters
        ----------
        length : float
            ``‖w_{t+1} − w_t‖``.
        lr : float, optional
            The clients' learning rate η; None if only they know it.
        loss : float, optional
            The training loss; None if it is not known. It is compared with the first positive one.
        """
        if length > 0:
            self.lengths.append((length, length / (lr or 1.0)))
            if all(map(self._is_long, zip(*self.lengths, strict=True))):
                self.long.append(len(self.lengths))
                if len(self.long) > 1 and self.long[-1] - self.long[-2] <= LAST:
                    usual = median(a for a, _ in self.lengths[-LAST - 1 : -1])
                    return (
                        f"for the second time the global step is over {STEPS:g} times the median of the "
                        f"last {LAST} ({length:.3g} against {usual:.3g})"
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

    @staticmethod
    def _is_long(lengths: tuple[float, ...]) -> bool:
        *before, last = lengths
        return len(before) >= LAST and last > max(STEPS * median(before[-LAST:]), before[0])

    def watch(self, this_round: Round, options: Options, method: str, square: float) -> None:
        """Judge a round by the squared length of its step (of the trained arrays), before the model moves.

        The first sign is logged, and is the history's ``"divergence"`` of that round. Under ``privacy=``
        the clients' losses are not read: they get no noise, and the end of a training would tell of them.

        Raises RoundFailed at every sign if ``on_divergence="stop"``.
        """
        loss = None if options.privacy is not None else _usual_loss(this_round)
        sign = self.look(math.sqrt(square), this_round.lr, loss)
        stop = options.on_divergence == "stop"
        if not sign or (self.warned and not stop):
            return
        self.warned = True
        likely = ", or ".join(suspects(options.term, this_round.config, this_round.lr))
        text = (
            f"round {this_round.number} of {method} looks like divergence: {sign}; "
            f"try a smaller {likely}"
        )
        this_round.events["divergence"] = text
        if stop:
            raise RoundFailed(
                f"{text} (on_divergence='stop': `strategy.arrays` is the model before this round)"
            )
        LOG.warning("%s", text)


def suspects(term: Chain, config: Mapping[str, Any], lr: float | None) -> list[str]:
    """Return what is most often too large, with its value: the terms' strengths, and the learning rates.

    Of each term: its first hyper-parameter that is a number, which is its strength, and those above their
    default. A term that compresses has none.
    """
    likely = []
    for t in term.terms:
        numbers = [(f, v) for f in fields(t) if _is_number(v := getattr(t, f.name))]
        if not numbers and isinstance(t, Steps):
            likely.append(f"learning rate of the '{t.name}'")
        for i, (f, value) in enumerate(numbers):
            high = value > f.default if _is_number(f.default) else i == 0
            if value > 0 and (i == 0 or high) and not isinstance(t, Compresses):
                likely.append(f"{t.name}.{f.name} ({value:g})")
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
