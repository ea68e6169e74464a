"""How EFL's sums travel: their code, uploads that lie, rounds without new ones, bytes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flwr_regs import EFL, EFLClient, Elastic, InProcessGrid
from flwr_regs.client.measure import context_functions
from flwr_regs.methods.parts.fisher_code import SumsCode
from flwr_regs.testing.problem import app_of
from tests.conftest import close, make_clients, noted, run, wide
from tests.methods.early_stops import Forgetful

Slot = dict[str, Any]


def sums_like(u: list[float], **shapes: tuple[int, ...]) -> Slot:
    """U as one vector over the parameters by name, and V = −U."""
    flat, out, start = torch.tensor(u), {}, 0
    for name in sorted(shapes):
        size = int(np.prod(shapes[name]))
        out[f"U.{name}"] = flat[start : start + size].reshape(shapes[name])
        out[f"V.{name}"] = -out[f"U.{name}"]
        start += size
    return out


def through(code: SumsCode, sums: Slot) -> Slot:
    """What arrives, as `check` and `fold` see it."""
    params = {key[2:]: np.asarray(a) for key, a in sums.items() if key[0] == "U"}
    return code.checked({key: a.numpy() for key, a in code.encode(sums).items()}, params)


# the code


def test_the_largest_entries_arrive_and_of_equal_ones_the_first() -> None:
    sums = sums_like([1.0, 5.0, 3.0, 3.0, 0.0, 3.0], b=(2,), a=(2, 2))  # a comes first
    got = through(SumsCode(density=0.5), sums)
    np.testing.assert_array_equal(got["U.a"], [[0.0, 5.0], [3.0, 3.0]])
    np.testing.assert_array_equal(got["U.b"], [0.0, 0.0])
    np.testing.assert_array_equal(got["V.a"], -got["U.a"])
    one = through(SumsCode(density=1e-9), sums)
    assert sum(np.count_nonzero(a) for key, a in one.items() if key[0] == "U") == 1
    close(through(SumsCode(density=1.0), sums), {k: a.numpy() for k, a in sums.items()}, 0.0)


@pytest.mark.parametrize("largest", [0.0, 1e-42, 1e-12, 1.0, 1e9, 1e15])
def test_sixteen_bits_hold_any_range(largest: float) -> None:
    """A relative error of 2⁻¹¹ for entries within 2⁻²⁹ of the largest, and nothing becomes infinite."""
    u = torch.tensor([1.0, 0.3, 1e-4, 2.0**-29, 2.0**-60, 0.0]) * largest
    got = through(SumsCode(half=True), {"U.w": u, "V.w": -u})
    big = u.numpy() if largest > 1e-30 else u.numpy()[:0]  # subnormal numbers have fewer digits
    assert np.isfinite(got["U.w"]).all()
    np.testing.assert_allclose(got["U.w"][:4][: len(big)], big[:4], rtol=2**-10.9)
    np.testing.assert_allclose(got["U.w"], u.numpy(), rtol=0, atol=2.0**-11 * largest)
    np.testing.assert_array_equal(got["V.w"], -got["U.w"])


# uploads that lie

PARAMS = {"w": np.zeros((30, 10)), "b": np.zeros(7)}  # 307 entries in two blocks
ALL = Elastic(1.0, sums_bits=16, sums_every=2, sums_density=0.1)


def honest() -> dict[str, np.ndarray]:
    u = torch.rand(307, generator=torch.Generator().manual_seed(1)).tolist()
    slot = SumsCode(half=True, density=0.1).encode(sums_like(u, b=(7,), w=(30, 10)))
    return {key: a.numpy() for key, a in slot.items()} | {"holds": np.array(0)}


def replaced(**entries: Any) -> Callable[[Slot], Slot]:
    return lambda slot: {**slot, **entries}


def shifted(slot: Slot) -> Slot:
    """As many positions, all in a block of which only 51 entries exist: the last is beyond the end."""
    return {**slot, "counts": np.array([0, 30], np.int16), "low": np.arange(22, 52, dtype=np.uint8)}


def twice(slot: Slot) -> Slot:
    low = slot["low"].copy()
    low[1] = low[0]
    return {**slot, "low": low}


def without(key: str) -> Callable[[Slot], Slot]:
    return lambda slot: {k: a for k, a in slot.items() if k != key}


HUGE = np.full(2, 2**14, np.int16)
LIES: list[tuple[str, Callable[[Slot], Slot]]] = [
    ("expected", without("U")),
    ("expected", without("scale")),
    ("expected", replaced(more=np.zeros(3, np.float32))),
    ("'U' is float32", lambda s: {**s, "U": s["U"].astype(np.float32)}),
    ("'V' is float16", lambda s: {**s, "V": s["V"][:-1]}),
    ("'low' is int64", lambda s: {**s, "low": s["low"].astype(np.int64)}),
    ("'counts' is int16", replaced(counts=np.zeros(3, np.int16))),
    ("'counts' must add up to 30", replaced(counts=np.array([-1, 31], np.int16))),
    ("'counts' must add up to 30", replaced(counts=HUGE)),
    ("must ascend", twice),
    ("must ascend", shifted),
    ("negative squares", lambda s: {**s, "U": -s["U"]}),
    ("'scale' is", replaced(scale=np.array([0.0, 1.0], np.float32))),
    ("'scale' is", replaced(scale=np.array([1.0, -1.0], np.float32))),
    ("'U.w' holds values beyond", replaced(scale=np.array([1e13, 1.0], np.float32))),
    (r"expected \['holds'\]", without("holds")),
    ("'holds' is", replaced(holds=np.zeros(3, np.int64))),
    ("'holds' is", replaced(holds=np.array(0.5))),
]


@pytest.mark.parametrize(("match", "lie"), LIES)
def test_a_lie_is_refused(match: str, lie: Callable[[Slot], Slot]) -> None:
    ALL.check(honest(), PARAMS, {})
    with pytest.raises(ValueError, match=match):
        ALL.check(lie(honest()), PARAMS, {})


def test_the_dtypes_of_a_message_are_not_torchs_default() -> None:
    sent = honest()
    torch.set_default_dtype(torch.float64)
    try:
        ALL.check(sent, PARAMS, {})
    finally:
        torch.set_default_dtype(torch.float32)


def test_sums_that_were_not_asked_for_are_refused() -> None:
    server = {"age": np.array(1), "made": np.array(1)}
    ALL.check({"holds": np.array(10**9)}, PARAMS, server)
    with pytest.raises(ValueError, match="expected 'holds' alone in this round"):
        ALL.check(honest(), PARAMS, server)
    with pytest.raises(ValueError, match="expected"):
        ALL.check({"holds": np.array(0)}, PARAMS, {})


# rounds without new sums


def test_fisher_information_is_computed_only_when_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = noted(monkeypatch, context_functions, "fisher_diagonal")
    strategy = EFL(0.4, sums_every=3, seed=1, fraction_evaluate=0.0)
    run(strategy, EFLClient, rounds=7)
    assert len(calls) == 3 * 4  # rounds 1, 4 and 7


Wide = partial(wide, 3000)  # of 24,003 parameters


class ForgetfulOne(Forgetful):
    who, before = (1,), 6


def test_sums_of_every_third_round_travel_once() -> None:
    """And once more, a round later, to a client that lost them; in that round it gets the model."""
    strategy = EFL(0.1, 0.01, 0.01, seed=1, fraction_evaluate=0.0, sums_every=3)
    grid = ForgetfulOne(app_of(EFLClient, make_clients(3, torch.float32), Wide), 3)
    run(strategy, EFLClient, rounds=7, model=Wide, grid=grid)
    history, dense = strategy.history, 8 * 24_003
    assert not any(e["failures"] for e in history)
    up = [e["bytes_up"][0] > dense for e in history]
    assert up == [True, False, False, True, False, False, True]
    down = [[e["bytes_down"][k] > dense for e in history] for k in (0, 1)]
    assert down[0] == [False, True, False, False, True, False, False]
    assert down[1] == [False, True, False, False, True, False, True]
    few = EFL(0.1, 0.01, 0.01, seed=1, fraction_train=0.4, fraction_evaluate=0.0, sums_every=9)
    grid = InProcessGrid(app_of(EFLClient, make_clients(5, torch.float32), Wide), 5)
    run(few, EFLClient, rounds=9, model=Wide, grid=grid)
    sent = [pid for e in few.history[1:] for pid, size in e["bytes_down"].items() if size > dense]
    assert sorted(sent) == [*range(5)]
