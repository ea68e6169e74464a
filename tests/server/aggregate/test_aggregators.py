"""Aggregators against plain loops, and what they make of a whole round."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import flwr_regs as fr
from flwr_regs.abilities import Checks, Folds
from flwr_regs.chain import chain
from flwr_regs.server.aggregate import aggregators
from flwr_regs.server.aggregate.aggregators import Aggregate, Aggregator, TooFewVectors, Vectors
from flwr_regs.server.aggregate.weights import bounded_shares, cut_weights, restricted
from flwr_regs.server.exchange.network import Request
from flwr_regs.server.options import Options
from flwr_regs.server.round import RoundFailed
from flwr_regs.server.training import Training
from flwr_regs.term import ServerContext, Slot, Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.parcel import Parcel, Record
from tests.conftest import Log, close
from tests.oracles import aggregators as oracle
from tests.server.network import ECHOED, NumpyNetwork, run

Rows = list[list[float]]
CASES: list[tuple[Any, Callable[[Rows], list[float]]]] = [
    (fr.CoordinateMedian(), oracle.coordinate_median),
    (fr.TrimmedMean(1 - 5 / 6), lambda xs: oracle.trimmed_mean(xs, 0.17)),  # of 6, just below 1
    (fr.TrimmedMean(0.49), lambda xs: oracle.trimmed_mean(xs, 0.49)),
    (fr.TrimmedMean(0.0), oracle.mean),
    (fr.Krum(1), lambda xs: oracle.krum(xs, 1, 1)[0]),
    (fr.Krum(0, 3), lambda xs: oracle.krum(xs, 0, 3)[0]),
    (fr.Krum(2, 3), lambda xs: oracle.krum(xs, 2, 3)[0]),
    (fr.GeometricMedian(), oracle.geometric_median),
    (fr.NormBound(), lambda xs: oracle.norm_bound(xs, None)),
    (fr.NormBound(0.7), lambda xs: oracle.norm_bound(xs, 0.7)),
    (fr.CenteredClipping(0.5), lambda xs: oracle.centered_clipping(xs, 0.5, 3)),
    (fr.CenteredClipping(None, 2), lambda xs: oracle.centered_clipping(xs, None, 2)),
]
ROBUST: dict[Any, Callable[..., list[float]] | None] = {
    # with the oracle, without a bound for buffers and uploads, whose units are not those of the updates
    fr.CoordinateMedian(): oracle.coordinate_median,
    fr.TrimmedMean(0.25): lambda xs: oracle.trimmed_mean(xs, 0.25),
    fr.GeometricMedian(): oracle.geometric_median,
    fr.NormBound(1.0): lambda xs, bound=None: oracle.norm_bound(xs, bound),
    fr.CenteredClipping(1.0): lambda xs, bound=None: oracle.centered_clipping(xs, bound, 3),
    fr.Krum(1, 3): None,  # the mean of those that it kept, clipped
}


def of_kept(rows: Rows, kept: list[int], heard: Rows | None = None) -> list[float]:
    """Krum's mean of values other than updates: none is longer than the median of those that came."""
    most = oracle.middle([oracle.norm(r) for r in heard or rows])
    return oracle.mean([oracle.clipped(rows[k], most) for k in kept])


def matrix(n: int, seed: int = 0) -> np.ndarray:
    """n vectors of 7 numbers; with ties, of most if n is not 6; an outlier of 1e9, and one that is zero."""
    x = np.random.default_rng(seed).normal(size=(n, 7)) + 0.5
    x[[1, 4, 5][: 1 if n == 6 else 3]] = x[0]
    x[2] = 1e9
    x[3] = 0.0
    return x


def vectors(x: np.ndarray) -> Vectors:
    """The rows of a matrix, in three parts."""
    parts = {"a": x[:, :3], "b": x[:, 3:3], "c": x[:, 3:]}
    sizes = {name: part.shape[1] for name, part in parts.items()}
    return Vectors(range(len(x)), sizes, lambda name, at: parts[name][:, at].copy())


def result(aggregator: Any, x: np.ndarray) -> np.ndarray:
    weights = np.full(len(x), 1 / len(x))
    return np.asarray(aggregator.aggregate(vectors(x), weights).vector)


@pytest.mark.parametrize("n", [6, 7])
@pytest.mark.parametrize(("aggregator", "expected"), CASES, ids=[repr(c[0]) for c in CASES])
def test_each_aggregator_is_its_papers(
    aggregator: Any, expected: Any, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-9, in one block and in blocks of two coordinates; and the clients' order does not matter."""
    x = matrix(n, seed=n)
    found = result(aggregator, x)
    scale = 1e-9 * max(1.0, float(np.abs(found).max()))
    np.testing.assert_allclose(found, expected(x.tolist()), rtol=0, atol=scale)
    monkeypatch.setattr(aggregators, "READ", 2 * n)
    np.testing.assert_allclose(result(aggregator, x), found, rtol=0, atol=scale)
    np.testing.assert_allclose(result(aggregator, x[::-1]), found, rtol=0, atol=scale)


@pytest.mark.parametrize("offset", [0.0, 1e9])
@pytest.mark.parametrize(("byzantine", "keep"), [(0, 1), (2, 4)])
def test_krum_keeps_the_clients_with_the_least_scores(
    byzantine: int, keep: int, offset: float
) -> None:
    """Of equal scores the first. ``‖x‖² + ‖y‖² − 2 x·y`` alone would lose distances far from zero."""
    x = np.random.default_rng(5).integers(-9, 9, (9, 7)) / 8 + offset
    x[7] = x[4]
    found = fr.Krum(byzantine, keep).aggregate(vectors(x), np.ones(9))
    assert list(found.selected or ()) == oracle.krum(x.tolist(), byzantine, keep)[1]
    ties = fr.Krum(0).aggregate(vectors(np.ones((4, 7))), np.ones(4))
    assert ties.selected == [0]


@pytest.mark.parametrize(
    ("aggregator", "n"), [(fr.Krum(1), 3), (fr.Krum(2, 4), 5), (fr.Krum(0), 2)], ids=repr
)
def test_too_few_vectors_are_refused_with_both_numbers(aggregator: Any, n: int) -> None:
    text = f"Krum\\(.*\\) needs at least {n + 1}, and there are {n}"
    with pytest.raises(TooFewVectors, match=text):
        result(aggregator, np.ones((n, 7)))
    result(aggregator, np.ones((n + 1, 7)))


# Weights


@pytest.mark.parametrize("most", [0.2, 0.3, 0.45, 1.0])
@pytest.mark.parametrize("counts", [(1, 2, 3, 4, 10), (1e15, 1, 2, 3, 5), (3, 3, 3, 1, 1)], ids=str)
def test_weights_are_cut_and_spread_in_proportion(counts: Any, most: float) -> None:
    total = math.fsum(counts)
    weights = {k: n / total for k, n in enumerate(counts)}
    found = cut_weights(weights, most)
    expected = oracle.cut_weights(weights, most)
    assert found == pytest.approx(expected, rel=1e-9)
    assert sum(found.values()) == pytest.approx(1.0)
    assert max(found.values()) <= most


def test_a_part_of_a_round_has_the_weights_and_replies_of_its_clients_alone() -> None:
    replies: Any = dict.fromkeys(range(3))
    ctx = ServerContext(1, 0.1, weights={0: 0.2, 1: 0.3, 2: 0.5}, replies=replies)
    part = restricted(ctx, [0, 1])
    assert part.weights == {0: 0.4, 1: 0.6}
    assert part.replies.keys() == {0, 1}


def test_weights_within_their_bound_stay_as_they_are_to_the_bit() -> None:
    """Those of p_k that are cut already are not cut a second time, by rounding."""
    for seed in range(50):
        counts = np.random.default_rng(seed).integers(20, 60, 6) / 7
        counts[0] *= 10**4
        most = 0.3
        weights = cut_weights({k: n / sum(counts) for k, n in enumerate(counts)}, most)
        assert bounded_shares(weights, most) == weights
        bounded = bounded_shares({**weights, 3: 10.0}, most)
        assert {**bounded, 3: 10.0} == {**weights, 3: 10.0}
        assert bounded[3] == pytest.approx(most * sum(bounded.values()), rel=1e-9)


# A round

STATISTICS = ("norm.running_mean", "norm.num_batches_tracked")
MODEL: NDArrays = {
    "w": np.linspace(-1, 1, 6).reshape(2, 3),
    "b": np.zeros(3, np.float32),
    "norm.running_mean": np.zeros(3, np.float32),
    "norm.num_batches_tracked": np.asarray(4),
}


def reply_arrays(k: int, scale: float = 1.0) -> NDArrays:
    rng = np.random.default_rng([0, k])
    out = {n: w + scale * rng.normal(0.3, 1.0, w.shape).astype(w.dtype) for n, w in MODEL.items()}
    return out | {"norm.num_batches_tracked": np.asarray(4 + (k + 2) * (1 + round(scale > 1) * 99))}


def network(n: int, hostile: int | None = None, uploads: Any = lambda k: {}) -> NumpyNetwork:
    """Clients with random models, ``k + 1`` examples, and ``k + 1`` of 4 steps."""

    def client(k: int, request: Request, parcel: Parcel) -> Parcel:
        if request.kind == keys.IDENTIFY:
            return Parcel(config={"partition-id": k, "num-partitions": n})
        arrays = reply_arrays(k, 1e6 if k == hostile else 1.0)
        extra = {f"{name}.upload": Record(slot) for name, slot in uploads(k).items()}
        said = {keys.NOT_TRAINED_KEY: sorted(STATISTICS), keys.MEMORY_KEY: [keys.KEEPS_STATE]}
        return Parcel(
            {keys.ARRAYS: Record(arrays), **extra},
            {key: parcel.config[key] for key in ECHOED} | said,
            {"num-examples": k + 1, "local-steps": min(k + 1, 4), "planned-steps": 4},
        )

    return NumpyNetwork(n, client)


def training(terms: Any = (), **settings: Any) -> Training:
    options = Options.of(chain(terms), seed=3, min_train_nodes=1, **settings)
    model = {n: w.copy() for n, w in MODEL.items()}
    return Training(options, "FedAvg", model, 5, lambda kind, metrics: {})


CONFIG = {"lr": 0.1, "local-steps": 4}


def moved(train: Training, net: NumpyNetwork, rounds: int = 1) -> NDArrays:
    for t in range(1, rounds + 1):
        run(train.round(t, CONFIG, net), net)
    return train.model.model


@pytest.mark.parametrize("incomplete", ["average", "scale"])
@pytest.mark.parametrize("aggregator", ROBUST, ids=repr)
def test_a_round_is_the_aggregate_of_scaled_updates_and_of_each_buffer(
    aggregator: Any, incomplete: str
) -> None:
    """Trained parameters are one vector of x_k = (ω_k / p_k) Δ_k; buffers are never scaled."""
    n = 6
    train = training(aggregator=aggregator, incomplete=incomplete)
    found = moved(train, network(n, hostile=4))
    names = ("w", "b")
    gaps = [
        {m: (arrays[m].astype(np.float64) - w).ravel().tolist() for m, w in MODEL.items()}
        for arrays in (reply_arrays(k, 1e6 if k == 4 else 1.0) for k in range(n))
    ]
    ratios = [4 / min(k + 1, 4) if incomplete == "scale" else 1.0 for k in range(n)]
    x = [[r * v for m in names for v in gap[m]] for gap, r in zip(gaps, ratios, strict=True)]
    expected, kept = ROBUST[aggregator], None
    bounds = isinstance(aggregator, fr.NormBound | fr.CenteredClipping)
    if expected is None:
        step, kept = oracle.krum(x, aggregator.byzantine, aggregator.keep)
    else:
        step = expected(x, 1.0) if bounds else expected(x)
    np.testing.assert_allclose(
        np.concatenate([(found[m] - MODEL[m]).ravel() for m in names]), step, rtol=0, atol=1e-6
    )
    for m in STATISTICS:
        rows = [gap[m] for gap in gaps]
        change = np.asarray(of_kept(rows, kept or []) if expected is None else expected(rows))
        whole = np.rint(change) if MODEL[m].dtype.kind == "i" else change
        np.testing.assert_allclose((found[m] - MODEL[m]).ravel(), whole, rtol=0, atol=1e-5)
    entry = train.history[0]
    assert entry.get("selected") == kept
    assert ("bounded" in entry) == bounds


def test_a_cut_weight_is_named_and_an_impossible_bound_warned_of_once(log: Log) -> None:
    train = training(max_weight=0.3)
    gap = reply_arrays(4)["b"].astype(np.float64)
    others = sum((k + 1) / 10 * 0.7 * reply_arrays(k)["b"].astype(np.float64) for k in range(4))
    np.testing.assert_allclose(moved(train, network(5))["b"], 0.3 * gap + others, atol=1e-6)
    assert train.history[0]["bounded"] == [4]
    few = training(max_weight=0.1)
    moved(few, network(5), rounds=2)
    assert log("max_weight") == ["max_weight=0.1 is impossible for 5 replies: each weighs 1/5"]
    assert [e["bounded"] for e in few.history] == [[3, 4]] * 2


# Own aggregators


@dataclass(frozen=True)
class Own:
    """Returns what it is given."""

    back: Any

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Any:
        return self.back(vectors)


@pytest.mark.parametrize(
    ("back", "sentence"),
    [
        (lambda v: {}["gone"], "aggregator=Own.*fails: KeyError: 'gone'"),
        (lambda v: np.zeros(v.size + 1), r"returned an array of shape \(10,\), expected \(9,\)"),
        (lambda v: np.full(v.size, np.nan), "returned NaN or infinity"),
        (lambda v: ["a"] * v.size, "returned a list, expected an array of numbers"),
        (lambda v: Aggregate(np.zeros(v.size), [77]), r"selected \[77\], expected some of \[0, "),
        (lambda v: Aggregate(np.zeros(v.size), []), r"selected \[\], expected some"),
    ],
)
def test_a_broken_aggregator_fails_the_round_by_its_name(back: Any, sentence: str) -> None:
    train = training(aggregator=Own(back))
    assert isinstance(Own(back), Aggregator)
    with pytest.raises(RoundFailed, match=f"round 1 of FedAvg: (?s:.*){sentence}"):
        moved(train, network(3))
    close(train.model.model, MODEL, 0.0)
    assert train.history[0]["replies"] == [0, 1, 2]


# Uploads


class Quiet(Term):
    """Uploads one array without a check, and says nothing of aggregators."""

    name: ClassVar[str] = "quiet"

    def finish(self, delta: Any, ctx: Any) -> Any:
        return delta, {"u": delta["w"]}, {}


class Uploads(Quiet, Checks):
    """Its upload is checked."""

    name: ClassVar[str] = "uploads"
    keeps_delta: ClassVar[bool] = True

    def check(self, upload: Slot, params: Any, server: Slot) -> None:
        assert set(upload) == {"u"}


class Sums(Uploads, Folds):
    """Adds up what clients send; notes who came."""

    name: ClassVar[str] = "sums"

    def adds(self, key: str) -> bool:
        return key == "u"

    def fold(self, acc: Slot, pid: int, delta: Any, upload: Slot, weight: float, ctx: Any) -> Slot:
        return {**acc, "u": acc.get("u", 0.0) + upload["u"], f"came.{pid}": np.asarray(1)}

    def update(self, server: Slot, delta: Any, uploads: Slot, ctx: Any) -> Any:
        return dict(uploads), delta


class Asks(Uploads):
    """Takes the mean of what clients send from its context."""

    name: ClassVar[str] = "asks"
    robust: ClassVar[bool] = True

    def update(self, server: Slot, delta: Any, uploads: Mapping[int, Slot], ctx: Any) -> Any:
        return {**ctx.aggregated(uploads), "came": np.array(sorted(uploads))}, delta


def sent(k: int, hostile: int | None = None) -> np.ndarray:
    return np.random.default_rng([7, k]).normal(1.0, 0.3, (2, 2)) * (1e9 if k == hostile else 1.0)


@pytest.mark.parametrize("aggregator", ROBUST, ids=repr)
@pytest.mark.parametrize("term", [Sums(), Asks()], ids=lambda t: t.name)
def test_uploads_go_through_the_aggregator(term: Any, aggregator: Any) -> None:
    """Also from a client whose update is as good as any: it may be among those that Krum keeps."""
    n = 9
    slots = []
    for hostile in (None, 0, 5, 8):
        train = training([term], aggregator=aggregator)
        moved(train, network(n, uploads=lambda k: {term.name: {"u": sent(k, hostile)}}))  # noqa: B023
        slots.append(train.model.server[term.name])
    kept = train.history[0].get("selected", list(range(n)))
    rows = [sent(k).ravel().tolist() for k in range(n)]
    krum, times = isinstance(aggregator, fr.Krum), n if term.name == "sums" else 1
    if krum:
        u = of_kept(rows, kept, None if term.name == "sums" else [rows[k] for k in kept])
    else:
        u = ROBUST[aggregator](rows)
    np.testing.assert_allclose(slots[0]["u"].ravel(), np.array(u) * times, rtol=1e-9)
    came = {int(k[5:]) for k in slots[0] if k.startswith("came.")}
    assert kept == (sorted(came) if term.name == "sums" else slots[0]["came"].tolist())
    if krum and term.name == "asks":
        return  # of one client alone there is no median
    for slot in slots[1:]:
        assert np.abs(slot["u"] - slots[0]["u"]).max() < 3 * times


def test_uploads_that_the_aggregator_does_not_reach_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Krum.* not reach .* of Uploads upload.*ctx.aggregated"):
        training([Uploads()], aggregator=fr.Krum(1))
    training([Uploads()])
    train = training([Quiet()], aggregator=fr.CoordinateMedian())  # seen only when they come
    names = {1: "quiet", 2: "\x1b" * 10**6}
    net = network(6, uploads=lambda k: {names[k]: {"u": sent(k)}} if k in names else {})
    moved(train, net)
    assert train.history[0]["replies"] == [0, 3, 4, 5]
    why = train.history[0]["failures"]
    assert "uploads of ['quiet'] beside its update" in why[1]
    assert len(why[2]) <= 600
    assert why[2].isprintable()


class Picky(Asks):
    """Cannot work with an upload that is not positive; only its update sees that."""

    def update(self, server: Slot, delta: Any, uploads: Mapping[int, Slot], ctx: Any) -> Any:
        if any((upload["u"] < 0).any() for upload in uploads.values()):
            raise ValueError("a root of it is not real")
        return super().update(server, delta, uploads, ctx)


class Moves(Term, Folds):
    """Folds updates alone, and takes none of a length that it does not like."""

    name: ClassVar[str] = "moves"

    def fold(self, acc: Slot, pid: int, delta: Any, upload: Slot, weight: float, ctx: Any) -> Slot:
        if pid == 2:
            raise ValueError("its update is odd")
        return acc


@pytest.mark.parametrize(
    ("term", "odd", "aggregator", "why"),
    [
        (Picky(), -np.ones((2, 2)), None, "its upload cannot be used.*a root of it is not real"),
        (Sums(), np.ones(3), None, "its upload cannot be used.*could not be broadcast together"),
        (Sums(), np.ones(3), fr.CoordinateMedian(), ""),
        (Moves(), None, None, "its update is odd"),
    ],
    ids=["update", "fold", "robust", "fold, no uploads"],
)
def test_a_reply_that_the_mean_cannot_use_costs_its_client(
    term: Any, odd: Any, aggregator: Any, why: str
) -> None:
    train = training([term], **({"aggregator": aggregator} if aggregator else {}))
    slots = {} if odd is None else {k: {term.name: {"u": [sent(k), odd][k == 2]}} for k in range(4)}
    moved(train, network(4, uploads=lambda k: slots.get(k, {})))
    assert train.history[0]["replies"] == [0, 1, 3]
    assert re.search(why, train.history[0]["failures"][2])


def test_clients_that_krum_leaves_out_keep_their_state() -> None:
    """They are not told that their reply was used; those that it kept are."""
    seen: dict[int, list[Any]] = {}
    net = network(6)
    inner = net._client

    def spy(k: int, request: Request, parcel: Parcel) -> Any:
        if request.kind == "train":
            seen.setdefault(k, []).append(parcel.config.get(keys.SNAPSHOTS_KEY))
        return inner(k, request, parcel)

    net._client = spy
    train = training(aggregator=fr.Krum(1, 2))
    moved(train, net, rounds=2)
    kept = train.history[0]["selected"]
    assert {k: said[1] for k, said in seen.items()} == {k: [int(k in kept), 1] for k in range(6)}
