"""The laws of flwr_regs.testing, run for each case of tests/laws.py; early stops."""

from itertools import product
from typing import Any

import torch

import flwr_regs as fr
from flwr_regs.testing import LAWS, Law, Method
from tests.laws import CASES
from tests.methods.early_stops import FORGETS, ROUNDS, equals_the_oracle
from tests.sampling import sampled

ELSEWHERE = torch.device("meta")
"""A block in which the user has chosen a default device. Tensors that are made on it hold no numbers."""
VARIANTS = [(law, variant) for law in LAWS.values() for variant in law.variants]


def name_of(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(name_of, value))
    return value if isinstance(value, str) else value.name


@sampled("case,variant", list(product(CASES, VARIANTS)), 3, name_of)
def test_the_law_holds(case: Method, variant: tuple[Law, str]) -> None:
    law, name = variant
    with ELSEWHERE:
        outcome = law.judge(case, name)
    may_skip = ("unused", "downlinks", "stacked")
    assert not outcome.startswith("skipped") or law.name in may_skip


NOTHING_KEPT = ("SCAFFOLD-server", "SCAFFOLD-server-1", "EFL-down", "EFL-sums-16")
"""Cases that leave nothing with the clients, whatever their method's row says."""


def keeps(case: Method) -> bool:
    return bool(fr.METHODS[case.strategy.__name__].state) and case.name not in NOTHING_KEPT


@sampled("case,how", list(product(CASES, ("used", "drop"))), 4, name_of)
def test_some_clients_stop_early_and_one_forgets(case: Method, how: str) -> None:
    """So every case is always compared with its oracle; its other laws are sampled."""
    with ELSEWHERE:
        history = equals_the_oracle(case, how, keeps(case))[0].history
    short = [sorted(e["incomplete"] + e["inactive"]) for e in history]
    assert short[:4] == [[], [1], [0, 1], [2, 4]]
    unused = [set(e["cohort"]) - set(e["replies"]) for e in history]
    assert sum(map(len, unused)) == (6 if how == "drop" else 1)
    lost = [{2} if keeps(case) and t == FORGETS else set[int]() for t in ROUNDS]
    again = {2} if keeps(case) and how == "drop" else set()  # its reply of round 4 was not used
    assert [set(e["lost_state"]) for e in history] == [*lost[:-1], again]
