"""Sums of updates against their definition in whole arrays, the step that follows, and their memory."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.server.aggregate import updates
from flwr_regs.server.aggregate.robust_round import Means
from flwr_regs.server.aggregate.updates import Updates, mean_delta
from flwr_regs.server.global_model import GlobalModel, as_step
from flwr_regs.server.round import Reply
from flwr_regs.term import ServerContext, Slot, Term
from flwr_regs.wire.arrays import LARGEST, PIECE, ProtocolError, add, check_finite
from flwr_regs.wire.parcel import Row, Stack
from tests.conftest import peak

Arrays = dict[str, np.ndarray]
DTYPES = ("f2", "f4", "f8", "i1", "u1", "i4", "i8", "?")
SHAPES = {"0-d": (), "empty": (0, 3), "one": (1,), "matrix": (7, 5), "long": (PIECE + 3,)}


def whole(
    base: Mapping[str, np.ndarray],
    replies: Mapping[int, Reply],
    weights: Mapping[int, float],
    scaled: Mapping[int, float],
    fixed: Collection[str],
) -> Arrays:
    """The definition, of `mean_delta`, in whole arrays."""
    out = {}
    for name, w in base.items():
        by = weights if name in fixed else scaled
        w64 = finite(w)
        total = np.zeros_like(w64)
        for k, reply in replies.items():
            if name in reply.delta or name in reply.arrays:
                total += by[k] * moved(reply, name, w64)
        out[name] = total.astype(w.dtype) if np.issubdtype(w.dtype, np.floating) else total
    return out


def moved(reply: Reply, name: str, w64: np.ndarray) -> np.ndarray:
    if name in reply.delta:
        return reply.delta[name].astype(np.float64)
    if name in reply.arrays:
        return np.asarray(finite(reply.arrays[name]) - w64)
    return np.zeros_like(w64)


def finite(array: np.ndarray) -> np.ndarray:
    wide = array.astype(np.float64)
    wide[~np.isfinite(wide)] = 0.0
    return wide


def drawn(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "?":
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(rng.standard_normal(shape) * 9 + 20).astype(dtype)


def model() -> Arrays:
    """All dtypes and shapes, both orders, and a mask with infinite constants."""
    rng = np.random.default_rng(0)
    arrays = {f"{d} {s}": drawn(rng, d, shape) for d in DTYPES for s, shape in SHAPES.items()}
    arrays |= {f"{d} turned": np.asfortranarray(drawn(rng, d, (6, 4))) for d in ("f4", "i8")}
    mask = np.zeros((9, 9), np.float32)
    mask[3:] = -np.inf
    return arrays | {"mask": mask}


def replies(base: Arrays, n: int = 5) -> dict[int, Reply]:
    """Some send all arrays, some differences, some not all; in the order of ids 0, 3, 6, …"""
    found = {}
    for k in range(n):
        rng = np.random.default_rng(k + 1)
        arrays = {}
        for name, w in base.items():
            v = drawn(rng, name.split()[0], w.shape) if name != "mask" else w.copy()
            arrays[name] = np.asfortranarray(v) if "turned" in name and k % 2 else v
        sent = {n: arrays.pop(n) for n in list(arrays) if k == 2 and n.startswith("f4")}
        if k == 3:
            del arrays["f8 long"]
        found[3 * k] = Reply(arrays, {}, {}, 1.0, sent)
    return found


def same(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert list(got) == list(expected)
    for name, a in expected.items():
        b = got[name]
        assert isinstance(b, np.ndarray)
        assert (b.dtype, b.shape) == (a.dtype, a.shape), name
        np.testing.assert_allclose(b, a, rtol=1e-14, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("n", [5, updates.TOGETHER + 3])
def test_sums_are_those_of_whole_arrays(n: int) -> None:
    """And lengths; also of more clients than are read at a time, or made whole if one is coded."""
    base, fixed = model(), ["f8 matrix", "i8 one", "? matrix"]
    came = replies(base, n)
    weights = {p: (p + 1) / n**2 for p in came}
    scaled = {p: w / 3 for p, w in weights.items()}
    expected = whole(base, came, weights, scaled, fixed)
    lengths = {
        name: {p: float((moved(r, name, finite(w)) ** 2).sum()) for p, r in came.items()}
        for name, w in base.items()
    }
    for reply in (came[6], replace(came[6], delta={}, coded=lambda: came[6].delta)):
        found: dict[str, dict[int, float]] = {}
        same(mean_delta(Updates(base, {**came, 6: reply}, weights, scaled, fixed), found), expected)
        assert all(found[name] == pytest.approx(lengths[name]) for name in base)


def test_rows_of_stacks_give_the_bits_of_clients_alone() -> None:
    base, n = model(), 7
    alone = {k: replace(r, delta={}) for k, r in enumerate(replies(base, n).values())}
    alone = {k: replace(r, arrays=replies(base, 1)[0].arrays | r.arrays) for k, r in alone.items()}
    stacked = dict(alone)
    for some in ([0, 1, 4], [6, 5]):  # 2 and 3 trained alone
        table = Stack({name: np.stack([alone[k].arrays[name] for k in some]) for name in base})
        stacked |= {k: replace(alone[k], arrays=Row(table, at)) for at, k in enumerate(some)}
    weights = {k: (k + 1) / n for k in range(n)}
    found, expected = (
        mean_delta(Updates(base, came, weights, weights, ["i4 one"])) for came in (stacked, alone)
    )
    for name in base:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def spoilt(name: str, value: float) -> Arrays:
    arrays = model()
    arrays[name].reshape(-1)[-1] = value
    return arrays


@pytest.mark.parametrize("name", ["f2 long", "f4 0-d", "f8 long", "mask"])
def test_a_value_that_is_not_usable_is_found(name: str) -> None:
    base = model()
    check_finite(base, "it", base, LARGEST)
    for value in (np.nan, np.inf):
        with pytest.raises(ProtocolError, match=f"it: array '{name}' holds NaN or infinity"):
            check_finite(spoilt(name, value), "it", base, LARGEST)
    if name[:2] != "f2":
        check_finite(spoilt(name, -1e15 if name[:2] == "f8" else -9.9e14), "it", base, LARGEST)
        with pytest.raises(ProtocolError, match=f"'{name}' holds values beyond ±1e\\+15"):
            check_finite(spoilt(name, -1.1e15), "it", base, LARGEST)
        constant = spoilt(name, 3e15)
        check_finite(constant, "it", constant, LARGEST)  # the model's own may stay


WEIGHTS = {0: 0.1, 3: 0.3, 6: 0.25, 9: 0.2, 12: 0.15}
SCALED = {p: w / 3 for p, w in WEIGHTS.items()}
CONTEXT = ServerContext(1, 0.1, weights=WEIGHTS)


class Same(Term):
    """Has an `update`; changes nothing."""

    name: ClassVar[str] = "same"

    def update(self, server: Slot, delta: Any, uploads: Any, ctx: Any) -> tuple[Slot, Any]:
        return server, delta


def advanced(terms: Any, base: Arrays, came: Mapping[int, Reply], **how: Any) -> GlobalModel:
    found = GlobalModel(chain(terms), base, **how)
    found.agree(found.fixed | {"f4 matrix", "f4 tied"}, {"f4 tied": "f4 long"})
    found.move(found.stepped(came, CONTEXT, SCALED, Means(fr.Mean())), CONTEXT)
    return found


@pytest.mark.parametrize("half", [None, "bfloat16"])
def test_the_model_moves_by_the_step_that_is_kept(half: str | None) -> None:
    """In each dtype; tied weights are one; a constant and what nobody moved stay."""
    base = model()
    base |= {"f4 tied": base["f4 long"].copy()}
    came = replies(base)
    found = advanced([], base, came, half=half, keeps_step=True)
    fixed = [n for n in base if n in (found.buffers or ())]
    step = whole(found.given if half else base, came, WEIGHTS, SCALED, fixed)
    assert found.step is not None
    for name, w in base.items():
        if name == "f4 tied":
            np.testing.assert_array_equal(found.model[name], found.model["f4 long"])
        elif not half:
            np.testing.assert_array_equal(found.model[name], add(w, found.step[name]), name)
            np.testing.assert_allclose(found.step[name], as_step(w, step[name]), rtol=1e-14)
    stepped = {n for n, s in found.step.items() if s.any()}
    assert {n for n, t in found.changed.items() if t} == stepped
    assert found.changed["mask"] == 0
    coded = {**came, 6: replace(came[6], delta={}, coded=lambda: came[6].delta)}
    for terms, sent in ([Same()], came), ([], coded), ([Same()], coded):
        same(advanced(terms, base, sent, half=half, keeps_step=True).model, found.model)


def test_a_round_takes_the_memory_of_its_step_and_of_the_new_model() -> None:
    base = {f"w{i}": np.ones((PIECE, 64), np.float32) for i in range(3)}
    sent = [{n: w + np.float32(k) for n, w in base.items()} for k in range(3)]
    came = {k: Reply(arrays, {}, {}, 1.0) for k, arrays in enumerate(sent)}
    weights, size = dict.fromkeys(came, 1 / 3), sum(w.nbytes for w in base.values())
    assert peak(lambda: mean_delta(Updates(base, came, weights, weights, []))) < 1.3 * size
    ctx = ServerContext(1, 0.1, weights=weights)
    for aggregator in (fr.Mean(), fr.CoordinateMedian(), fr.Krum(0)):
        step = partial(GlobalModel(chain([]), base).stepped, came, ctx, weights, Means(aggregator))
        assert peak(step) < 2.3 * size
