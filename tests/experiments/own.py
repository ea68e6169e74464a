"""A user's own terms, strategies and functions; the tests copy this file."""

from dataclasses import dataclass
from typing import ClassVar

from flwr_regs import RegClient, RegStrategy, Term


@dataclass(frozen=True)
class Decay(Term):
    name: ClassVar[str] = "decay"
    rate: float = 0.1

    def correct(self, grads, params, ctx):
        return {n: g + self.rate * params[n] for n, g in grads.items()}


class Decayed(RegStrategy):
    method = "Decayed"

    def __init__(self, rate=0.1, **settings):
        super().__init__([Decay(rate)], **settings)


class Special(Decayed):
    method = "Special"


class SpecialClient(RegClient):
    method = "Special"
    terms = (Decay,)


TERM = Decay(0.1)
TERMS = [Decay(0.1)]


def make(rate):
    return [Decay(rate)]


def strategy(rate):
    return Decayed(rate, max_scale=5)


class Bad(Term):
    name = "bad"

    def correct(self, grads, params, ctx):
        raise KeyError("x")
