"""The step to the new model: in blocks and threads, and what is kept of it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.methods.client_step.fedfor import FirstOrder
from flwr_regs.server.aggregate.step import as_step, stepped
from flwr_regs.server.aggregate.updates import Reply
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.term import ServerContext, Slot, Term
from flwr_regs.wire import blocks
from flwr_regs.wire.arrays import NDArrays, add
from tests.server.test_updates import model, replies, same


@dataclass(frozen=True)
class Same(Term):
    """Has an `update`, so that the whole mean is made; changes nothing."""

    name: ClassVar[str] = "same"

    def update(
        self, server: Slot, delta: Any, uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> tuple[Slot, Any]:
        return server, delta


def test_a_step_in_blocks_is_that_of_whole_arrays() -> None:
    """All dtypes, shapes and orders, and an array that does not move."""
    base = model()
    rng = np.random.default_rng(1)
    steps = {n: as_step(w, rng.normal(size=w.shape)) for n, w in base.items() if n != "mask"}
    steps["mask"] = np.zeros_like(base["mask"])
    kept = {n: np.empty_like(w) for n, w in base.items() if n != "f4 long"}
    vectors = {n: blocks.flat(s, blocks.order_of(base[n])) for n, s in steps.items()}
    found = stepped(base, lambda: lambda name, part: vectors[name][part], kept, 1 << 10)
    same(found.model, {n: add(w, steps[n]) for n, w in base.items()}, laid=False)
    same(kept, {n: steps[n] for n in kept}, laid=False)
    assert found.moved == {n for n, s in steps.items() if s.any()}
    assert "mask" not in found.moved
    for n, s in steps.items():
        assert found.squares[n] == pytest.approx((s.astype(float) ** 2).sum(), rel=1e-5), n


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e17])
def test_squares_of_small_and_large_steps_are_in_range(scale: float) -> None:
    step = np.full(1000, scale, np.float32)
    found = stepped({"w": np.zeros_like(step)}, lambda: lambda _, part: step[part], {}, 100)
    assert found.squares["w"] == pytest.approx(1000 * scale**2, rel=1e-5)


CONTEXT = ServerContext(1, 0.1, weights={0: 0.1, 3: 0.3, 6: 0.25, 9: 0.2, 12: 0.15})
SCALED = {p: w / 3 for p, w in CONTEXT.weights.items()}


def tied_model() -> NDArrays:
    base = model()
    return {**base, "f4 tied": base["f4 long"].copy()}


def advanced(terms: Any, base: NDArrays, came: Mapping[int, Reply], **how: Any) -> GlobalModel:
    found = GlobalModel(chain(terms), base, **how)
    found.agree(found.fixed | {"f4 matrix", "f4 tied"}, {"f4 tied": "f4 long"})
    found.advance(came, CONTEXT, SCALED)
    return found


@pytest.mark.parametrize("half", [None, "bfloat16"])
@pytest.mark.parametrize("threads", ["1", "3"])
def test_sums_that_are_the_step_move_the_model_as_whole_means_do(
    threads: str, half: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, also in threads, of tied weights, and where updates were coded."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(blocks, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(blocks.os, "sched_getaffinity", lambda _: range(8), raising=False)
    base = tied_model()
    came = replies(base)
    coded = {**came, 6: replace(came[6], delta={}, coded=lambda: came[6].delta)}
    whole = advanced([Same()], base, came, half=half, keeps_step=True)
    for terms, sent in ([], came), ([], coded), ([Same()], coded):
        found = advanced(terms, base, sent, half=half, keeps_step=True)
        same(found.model, whole.model)
        assert found.step is not None
        assert whole.step is not None
        same(found.step, whole.step, laid=False)
        assert found.changed == whole.changed
        np.testing.assert_array_equal(found.model["f4 tied"], found.model["f4 long"])
    same(advanced([], base, came, half=half).model, whole.model)


@pytest.mark.parametrize(
    ("terms", "how", "keeps"),
    [
        ([], {}, False),
        ([fr.SparseTernary(density_up=0.1)], {}, False),
        ([], {"keeps_step": True}, True),
        ([FirstOrder(0.1)], {}, True),
        ([Same()], {}, True),
    ],
)
def test_the_last_step_is_kept_where_something_may_read_it(
    terms: Any, how: Any, keeps: bool
) -> None:
    base = tied_model()
    assert (advanced(terms, base, replies(base), **how).step is not None) == keeps


def test_a_strategy_that_sends_changes_keeps_the_step() -> None:
    assert _kept(downlink="delta")
    assert not _kept()


def _kept(**settings: Any) -> bool:
    from flwr_regs.server.options import Options
    from flwr_regs.server.training import Training

    options = Options.of(chain([]), min_train_nodes=1, **settings)
    found = Training.begin(options, {"w": np.zeros(3, np.float32)})
    ctx = ServerContext(1, 0.1, weights={0: 1.0})
    found.advance({0: Reply({"w": np.ones(3, np.float32)}, {}, {}, 1.0)}, ctx, ctx.weights)
    return found.step is not None


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_round_takes_hardly_more_memory_than_the_new_model() -> None:
    base = {f"w{i}": np.ones((1 << 15, 60), np.float32) for i in range(3)}
    came = {k: Reply({n: w * k for n, w in base.items()}, {}, {}, 1.0) for k in range(12)}
    weights = dict.fromkeys(came, 1 / 12)
    ctx = ServerContext(1, 0.1, weights=weights)
    found = GlobalModel(chain([]), base)
    size = sum(w.nbytes for w in base.values())
    assert peak(lambda: found.advance(came, ctx, weights)) < 1.1 * size
