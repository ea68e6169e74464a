"""Half precision on the wire: what is rounded, where, and what it does not go with."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array
from flwr.client import NumPyClient

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.server.aggregate.robust_round import Means
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.server.round import Reply
from flwr_regs.wire import precision as half
from flwr_regs.wire.arrays import ProtocolError, check_finite
from flwr_regs.wire.parcel import Row, Stack
from flwr_regs.wire.records import to_record
from tests.conftest import Tampered, close, plain_fedavg
from tests.methods.test_models import METHODS, Counting, Kind, Method, perceptron, train


def in_torch(a: np.ndarray, half: str) -> torch.Tensor:
    return torch.tensor(a).to(getattr(torch, half))


HALVES = ["bfloat16", "float16"]
PLAIN = Kind("plain", perceptron)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_torchs_to_the_bit(dtype: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = np.arange(0, 2**16, dtype=np.uint32) << 16 | 0x8000  # halfway between two bfloat16
    every = np.concatenate([bits, ties]).view(np.float32)
    # what rounds to infinity is refused
    every = every[~(in_torch(every, dtype).isinf().numpy() & np.isfinite(every))]
    halfway = (np.arange(2048, 4096) * 2 + 1).astype(np.float32) / 4096  # between two float16
    for a in (every, halfway, np.zeros((0, 3), np.float32), np.asarray(1.1, np.float32)):
        coded = half.narrow({"a": a}, dtype)["a"]
        assert coded.shape == a.shape
        assert coded.itemsize == 2
        back = half.widen({"a": coded}, dtype)["a"]
        assert (back.shape, back.dtype) == (a.shape, np.float32)
        np.testing.assert_array_equal(back, in_torch(a, dtype).float().numpy())
    same = {"i": np.array([2**24 + 1]), "d": np.array([1 / 3]), "b": np.array([True])}
    assert all(half.narrow(same, dtype)[n] is a for n, a in same.items())


def test_what_a_half_cannot_hold_is_refused() -> None:
    big = {"x": np.array([1e5, 1.0], np.float32)}
    with pytest.raises(ProtocolError, match="'x' holds values beyond ±65504"):
        half.narrow(big, "float16")
    half.narrow(big, "bfloat16")
    with pytest.raises(ProtocolError, match=r"'x' holds values beyond ±3.39e38"):
        half.narrow({"x": np.finfo(np.float32).min.reshape(1)}, "bfloat16")
    model = {"w": np.zeros(2, np.float32), "n": np.zeros(2, np.uint16)}
    with pytest.raises(ValueError, match=r"but \['n'\] are uint16 themselves"):
        GlobalModel(chain([]), model, "bfloat16")


def test_a_stack_with_a_number_that_is_not_finite_is_looked_at_client_by_client() -> None:
    rows = Stack({"a": np.ones((2, 3), np.float32), "b": np.full((2, 3), np.nan, np.float16)})
    rows["b"][0] = 1
    check_finite(Row(rows, 0), "a reply")
    with pytest.raises(ProtocolError, match="'b' holds NaN"):
        check_finite(Row(rows, 1), "a reply")


@pytest.mark.parametrize("dtype", HALVES)
def test_the_master_equals_plain_loops_that_round_where_we_do(dtype: str) -> None:
    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.to(getattr(torch, dtype)).float()

    _, got = train(replace(PLAIN, wire=dtype), METHODS[0], rounds=4)
    expected, _ = plain_fedavg(PLAIN.model, [PLAIN.data(k) for k in range(2)], 4, 0.1, (), rounded)
    close(got, {n: w.numpy() for n, w in expected.items()}, 0.0)
    assert any((in_torch(a, dtype).float().numpy() != a).any() for a in got.values())


def test_a_variance_becomes_the_clients_mean_and_stays_positive() -> None:
    model = {"w": np.float32([0.7]), "var": np.float32([0.35]), "frozen": np.float32([0.7])}
    state = GlobalModel(chain([]), model, "bfloat16")
    state.buffers = frozenset({"var", "frozen"})
    given = state.given
    assert given["var"] != model["var"]
    end = {**given, "w": given["w"] + np.float32(0.125), "var": np.float32([2.0**-20])}
    replies = {0: Reply(end, {}, {}, 1.0)}
    ctx = replace(state.context(1, 0.1, 1), weights={0: 1.0})
    state.move(state.stepped(replies, ctx, {0: 1.0}, Means(fr.Mean())), ctx)
    assert 0 <= state.model["var"] < 1e-6
    assert state.model["frozen"] == np.float32(0.7)
    assert state.model["w"] == np.float32(0.7) + np.float32(0.125)


def test_a_model_that_leaves_the_range_ends_the_run_before_it_is_taken() -> None:
    method = Method(partial(fr.FedOpt, partial(torch.optim.SGD, lr=1e7)), fr.FedOptClient, [])
    with pytest.raises(fr.RoundFailed, match=r"diverged: array '.*' holds values beyond ±65504"):
        train(replace(PLAIN, wire="float16"), method)


class Flowers(NumPyClient):
    """A client of Flower's."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return [a + 1 for a in parameters], 3, {}


def in_float32(kind: str, pid: int, message: Any, reply: Any) -> Any:
    """Let a client send its first array in float32."""
    reply.content.get("arrays", {})["w"] = Array(np.float32([10.0**pid]))
    return reply


def test_the_range_of_a_half_binds_only_float32_arrays() -> None:
    app = fr.client_app(lambda context: Flowers())
    model = {"w": np.float32([0]), "seen": np.array([10**6]), "sum": np.array([1e6])}
    strategy = fr.FedAvg(wire_dtype="float16", fraction_evaluate=0.0)
    strategy.start(Tampered(app, 6, in_float32), to_record(model), 1)
    assert "'w' holds values beyond ±65504" in strategy.history[0]["failures"][5]
    assert strategy.arrays["seen"].numpy() == strategy.arrays["sum"].numpy() == 10**6 + 1
    assert strategy.arrays["w"].numpy() == 11111 / 5


def test_float32_arrays_leaves_the_model_as_it_is() -> None:
    model = Counting().to(torch.bfloat16)
    arrays = fr.float32_arrays(model)
    assert model.body.get_submodule("0").weight.dtype == torch.bfloat16
    assert (arrays["body.0.weight"].dtype, arrays["steps"].dtype) == ("float32", "int64")
    for name, value in model.state_dict().items():
        assert torch.equal(arrays.to_torch_state_dict()[name].to(value.dtype), value)
