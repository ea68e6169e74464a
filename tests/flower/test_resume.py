"""A run that was broken off and resumed equals the unbroken one to the bit, whatever the method."""

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr import serverapp as flower
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

import flwr_regs as fr
from flwr_regs import CheckpointError, InProcessGrid
from flwr_regs.flower.checkpoints import LEDGER
from flwr_regs.server.checkpoint.checkpoint import Folder, latest
from flwr_regs.testing import problem
from tests.conftest import Log, bits, budgeted, make_model, no_space, norm_model, start
from tests.laws import CASES

ROUNDS = 4
CONFIG = {"lr": 0.2, "local-epochs": 1, "user.nan": float("nan"), "user.tag": b"one"}


class Broken(BaseException):
    """The run ends here."""


class Breaking(InProcessGrid):
    """Ends the run after `served` clients of a round have trained; ``served=0``: nobody ends it."""

    number, served = 0, 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids: list[str] = []
        for i, message in enumerate(messages, start=1):
            kind = message.metadata.message_type
            config: Any = message.content.config_records.get("config", {})
            ids += super().push_messages([message])
            if (kind, config.get("server-round"), i) == ("train", self.number, self.served):
                raise Broken
        return ids


class Remote(Breaking):
    """Its clients live elsewhere: a checkpoint does not hold them, and they live on."""

    snapshot = None  # type: ignore[assignment]
    restore = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Case:
    """A method with settings of its own."""

    name: str
    strategy: Callable[..., fr.RegStrategy]
    client: Callable[..., Any]
    model: Callable[[], Any] = make_model
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, **more: Any) -> fr.RegStrategy:
        settings: dict[str, Any] = {"seed": 3, "fraction_train": 0.7, "fraction_evaluate": 0.0}
        settings |= {**self.settings, **more}
        return self.strategy(**settings)

    def grid(self, kind: type[Breaking] = Breaking) -> Breaking:
        dtype = next(self.model().parameters()).dtype
        return kind(problem.app_of(self.client, problem.make_clients(3, dtype), self.model), 3)


def half_done(base: Any) -> Any:
    """Clients that often take only some of their steps, or none."""
    return budgeted(base, [{0: 1, 1: 0}, {0: 0}, {2: 1, 0: 0}])


def halving(t: int) -> float:
    return 0.5 ** (t - 1)


METHODS = [Case(m.name, m.build, m.make_client) for m in CASES] + [
    Case("FedBN", fr.FedBN, fr.FedBNClient, norm_model),
    Case("FedPer", lambda **s: fr.FedPer("2.*", **s), fr.FedPerClient),
]
OF = {m.name: m for m in METHODS}


def beside(name: str, other: str, client: Any = None, model: Any = None, **settings: Any) -> Case:
    """One of the methods, with more settings."""
    case = OF[name]
    made = client or case.client, model or case.model
    return Case(f"{name}, {other}", case.strategy, *made, settings)


SHARING = partial(fr.FedAdamClient, share_label_counts=True)
ANEW: dict[str, Any] = {"restart_lr": True, "lr_schedule": halving}
OPTIONS = [
    beside("FedFOR-delta", "ahead", overlap=True),
    beside("FedAvg", "half", model=lambda: make_model().float(), wire_dtype="bfloat16"),
    beside("FedAvgM", "dropped", half_done(fr.FedAvgMClient), incomplete="drop", min_train_nodes=3),
    beside("FedProx", "inactive", half_done(fr.FedProxClient), drop_inactive=2.0, **ANEW),
    beside("FedAdam", "covering", SHARING, cohorts="class-covering", lr_schedule=halving),
    beside("RFedAvgPlus", "by time", checkpoint_every=timedelta(days=1)),
]
EACH = [OF["FedCurv"], OF["RFedAvg"], OF["FedBN"], *OPTIONS]


def train(strategy: fr.RegStrategy, grid: Any, case: Case | None = None, **more: Any) -> Any:
    """Run `start`."""
    model = (case or OF["FedAvg"]).model()

    def share(_: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"norm": float(sum(np.sum(a.numpy() ** 2) for a in arrays.values()))})

    settings = {"num_rounds": ROUNDS, "train_config": ConfigRecord(CONFIG), "evaluate_fn": share}
    return strategy.start(grid, ArrayRecord(model.state_dict()), **{**settings, **more})


def timeless(history: list[dict[str, Any]], *without: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k not in ("seconds", *without)} for e in history]


def numbers(result: Any) -> list[Any]:
    kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
    return [{t: dict(m) for t, m in getattr(result, kind).items()} for kind in kinds]


def break_off(case: Case, folder: Path, number: int, served: int, grid: Breaking) -> None:
    """Run until `served` clients of a round have trained."""
    grid.number, grid.served = number, served
    with pytest.raises(Broken):
        train(case.build(checkpoint_dir=folder), grid, case)
    grid.served = 0


UNBROKEN: dict[str, tuple[fr.RegStrategy, Any]] = {}


def unbroken(case: Case) -> tuple[fr.RegStrategy, Any]:
    """The strategy and the result of the unbroken run."""
    if case.name not in UNBROKEN:
        strategy = case.build()
        UNBROKEN[case.name] = strategy, train(strategy, case.grid(), case)
    return UNBROKEN[case.name]


@pytest.mark.parametrize("case", EACH, ids=lambda c: c.name)
def test_a_resumed_run_equals_the_unbroken_one(case: Case, tmp_path: Path) -> None:
    """Broken off in the middle of round 3, and resumed with new clients in place of the old ones."""
    whole, result = unbroken(case)
    break_off(case, tmp_path, 3, 1, case.grid())
    assert latest(tmp_path).round == 2
    again = case.build(checkpoint_dir=tmp_path)
    resumed = train(again, case.grid(), case, resume_from=tmp_path)
    assert bits(again.arrays) == bits(whole.arrays) == bits(resumed.arrays)
    assert timeless(again.history) == timeless(whole.history)
    assert numbers(resumed) == numbers(result)
    assert len(again.history) == ROUNDS


LIVE = [OF["EFL-up"], OF["FedBN"], OPTIONS[0]]


@pytest.mark.parametrize("case", LIVE, ids=lambda c: c.name)
def test_clients_that_live_on_go_back_to_before_the_broken_round(
    case: Case, tmp_path: Path
) -> None:
    """As SuperNodes of the same run: two have trained the round, one has not."""
    whole, _ = unbroken(case)
    grid = case.grid(Remote)
    break_off(case, tmp_path, 3, 2, grid)
    again = case.build(checkpoint_dir=tmp_path)
    train(again, grid, case, resume_from=tmp_path)
    assert bits(again.arrays) == bits(whole.arrays)
    sizes = ("bytes_down", "bytes_up", "bytes_ahead", "bytes_probe_down", "bytes_probe_up")
    assert timeless(again.history, *sizes) == timeless(whole.history, *sizes)


def test_a_finished_run_is_resumed_to_train_longer_or_to_return_its_result(tmp_path: Path) -> None:
    case = OF["FedADC-delta"]
    result = train(case.build(checkpoint_dir=tmp_path), case.grid(), case)
    again = case.build(checkpoint_dir=tmp_path)
    returned = train(again, case.grid(), case, resume_from=tmp_path)
    assert (bits(returned.arrays), numbers(returned)) == (bits(result.arrays), numbers(result))
    assert not any(a.flags.writeable for a in again.training.model.model.values())
    longer, whole = case.build(checkpoint_dir=tmp_path), case.build()
    train(longer, case.grid(), case, resume_from=tmp_path, num_rounds=6)
    train(whole, case.grid(), case, num_rounds=6)
    assert timeless(longer.history) == timeless(whole.history)
    assert bits(longer.arrays) == bits(whole.arrays)


class Overriding(fr.FedFOR):
    """As Flower's users write it: changes the config and the model, in place too."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        config["lr"] *= 0.5
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        arrays["0.bias"] = Array(0.5 * arrays["0.bias"].numpy())
        own = MetricRecord({**metrics, "mine": -server_round})
        return (None if server_round == 3 else arrays), own

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        super().aggregate_evaluate(server_round, replies)
        return MetricRecord({"of-clients": server_round % 4})


def numpys(number: int, arrays: Any) -> Any:
    arrays["0.bias"] = Array(0.0 * arrays["0.bias"].numpy())
    return {"mine": np.float32(number)}


def test_what_an_overridden_strategy_changes_counts_in_later_rounds_and_when_resumed(
    tmp_path: Path,
) -> None:
    case, ends = OF["FedFOR-model"], []
    for rounds, folder, resume in ((5, None, None), (3, tmp_path, None), (5, tmp_path, tmp_path)):
        strategy = Overriding(0.5, seed=3, checkpoint_dir=folder, keep_best="of-clients")
        how = {"num_rounds": rounds, "resume_from": resume, "evaluate_fn": numpys}
        result = train(strategy, case.grid(), case, **how)
        assert bits(result.arrays) == bits(strategy.arrays)
        assert result.best
        assert result.best.round == 3
        sources = [[e["train_metrics"]["mine"], e["evaluate_metrics"]] for e in strategy.history]
        assert sources == [[-t, {"of-clients": t % 4}] for t in range(1, rounds + 1)]
        ends.append(bits(result.arrays))
    assert ends[0] == ends[2]


def test_on_round_comes_after_the_checkpoint_and_its_end_is_saved(tmp_path: Path) -> None:
    saved: list[int] = []

    def callback(entry: dict[str, Any]) -> Any:
        saved.append(latest(tmp_path).round)
        return np.bool_(entry["round"] == 2)

    case = OF["FedAvg"]
    train(case.build(checkpoint_dir=tmp_path, on_round=callback), case.grid(), case)
    assert saved == [1, 2]
    assert latest(tmp_path).history[-1]["stopped"].endswith("returned True")
    resumed = case.build(checkpoint_dir=tmp_path)
    train(resumed, case.grid(), case, resume_from=tmp_path)
    assert not any("stopped" in entry for entry in resumed.history)  # it went on


AS_BEFORE = partial(fr.FedFOR, 0.5, seed=3)
SLOWER = ConfigRecord({**CONFIG, "lr": 0.1, "user.tag": b"two"})
REFUSALS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (lambda **s: fr.FedProx(0.5, seed=3, **s), {}, "method was 'FedFOR', now it is 'FedProx'"),
    (partial(fr.FedFOR, np.float32(0.25), seed=3), {}, r"alpha was 0\.5, now it is 0\.25"),
    (partial(fr.FedFOR, 0.5, seed=np.int64(4)), {}, "setting seed was 3, now it is 4"),
    (partial(AS_BEFORE, weighting="uniform"), {}, "was 'num-examples', now it is 'uniform'"),
    (AS_BEFORE, {"train_config": SLOWER}, r"lr was 0\.2, now it is 0\.1; .*b'one', .*b'two'"),
    (AS_BEFORE, {"num_rounds": 1}, "of round 2, beyond num_rounds=1"),
    (AS_BEFORE, {"case": OF["FedBN"]}, r"arrays 1\.weight was 'absent'"),
]


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-rounds")
    train(fr.FedFOR(0.5, seed=3, checkpoint_dir=folder), OF["FedFOR-model"].grid(), num_rounds=2)
    return folder


@pytest.mark.parametrize(("strategy", "more", "why"), REFUSALS, ids=[w[:30] for *_, w in REFUSALS])
def test_another_training_is_refused_before_a_client_is_asked(
    strategy: Any, more: dict[str, Any], why: str, two_rounds: Path
) -> None:
    grid = OF["FedFOR-model"].grid()
    grid.push_messages = None  # type: ignore[method-assign,assignment]
    with pytest.raises(CheckpointError, match=why):
        train(strategy(checkpoint_dir=two_rounds), grid, resume_from=two_rounds, **more)
    for resume in ({}, {"resume_from": two_rounds / "none"}):
        with pytest.raises(CheckpointError, match=r"holds checkpoints|is no folder"):
            train(fr.FedFOR(0.5, seed=3, checkpoint_dir=two_rounds), grid, **resume)
    Folder(two_rounds, latest(two_rounds)).close()  # no lock is left


def test_a_checkpoint_that_lacks_something_is_refused(tmp_path: Path) -> None:
    case = OF["FedAvg"]
    train(case.build(checkpoint_dir=tmp_path / "a"), case.grid(), num_rounds=1)
    checkpoint = latest(tmp_path / "a")
    del checkpoint.state["training"]["remembered"]["held"]
    other = Folder(tmp_path / "b")
    other.save(1, checkpoint.state, checkpoint.history)
    other.close()
    with pytest.raises(CheckpointError, match="cannot be resumed: it lacks 'held'"):
        train(case.build(), case.grid(), resume_from=tmp_path / "b")


@pytest.mark.parametrize("cause", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_sigterm_save_the_last_finished_round_first(
    cause: type[BaseException], tmp_path: Path
) -> None:
    case = OF["FedBN"]

    class Ended(Breaking):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            try:
                return super().push_messages(messages)
            except Broken:
                if cause is KeyboardInterrupt:
                    raise KeyboardInterrupt from None
                os.kill(os.getpid(), signal.SIGTERM)
                raise

    grid = case.grid(Ended)
    grid.number, grid.served = 4, 1
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(cause) as raised:
        train(case.build(checkpoint_dir=tmp_path, checkpoint_every=10), grid, case)
    assert cause is KeyboardInterrupt or raised.value.args == (143,)
    assert signal.getsignal(signal.SIGTERM) is before
    assert latest(tmp_path).round == 3
    again = case.build(checkpoint_dir=tmp_path)
    train(again, case.grid(), case, resume_from=tmp_path)
    assert bits(again.arrays) == bits(unbroken(case)[0].arrays)
    assert timeless(again.history) == timeless(unbroken(case)[0].history)


def private(limit: float | None = None, **more: Any) -> fr.RegStrategy:
    if not hasattr(flower, "PrivacyConfig"):
        pytest.skip("this Flower has no privacy accountant")
    kinds = (flower.NeighboringRelation.REPLACE_ONE, flower.SamplingMethod.WITHOUT_REPLACEMENT)
    config = flower.PrivacyConfig(1e-5, 3, *kinds, limit)
    accountant = flower.RdpAccountant(config, (2.0, 8.0))
    dp = fr.CentralDP(0.5, 1.0, accountant)
    return fr.FedAvg(privacy=dp, weighting="uniform", seed=3, fraction_train=0.7, **more)


def spent(strategy: fr.RegStrategy) -> int:
    return int(strategy.privacy.accountant.num_releases)


def test_privacy_that_was_spent_stays_spent(tmp_path: Path, log: Log) -> None:
    """Round 3 is released, but lost: it counts, and is not drawn again with its clients and its noise."""
    case, released = OF["FedAvg"], []

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        released.append(bits(arrays))
        if number == 3:
            raise Broken

    how: dict[str, Any] = {"rounds": ROUNDS, "config": CONFIG}
    first = private(checkpoint_dir=tmp_path)
    with pytest.raises(Broken):
        start(first, case.grid(), evaluate_fn=evaluate, **how)
    assert (spent(first), latest(tmp_path).round) == (3, 2)
    again, grid = private(checkpoint_dir=tmp_path), case.grid()
    start(again, grid, resume_from=tmp_path, **how)
    assert log("1 releases after round-000002 were lost, but count")
    assert spent(again) == 5
    assert again.history[2]["epsilon"] > first.history[1]["epsilon"] * 1.2
    assert bits(again.arrays) not in released
    assert again.training.privacy.cohort_seed != first.training.privacy.cohort_seed
    lived = private(checkpoint_dir=tmp_path)  # an accountant that lived on counts nothing twice
    lived.privacy.accountant.load_state_dict(again.privacy.accountant.state_dict())
    start(lived, case.grid(), resume_from=tmp_path, **how)
    assert spent(lived) == 5


def test_privacy_that_cannot_be_counted_ends_or_refuses_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = OF["FedAvg"].grid()
    train(private(checkpoint_dir=tmp_path), grid, num_rounds=2)
    with pytest.raises(CheckpointError, match="goes on only with checkpoint_dir="):
        train(private(), grid, resume_from=tmp_path)
    other = private(checkpoint_dir=tmp_path)
    other.privacy.accountant.compose(fr.flower.accounting.AccountedBudget(other.privacy)._event(3))
    with pytest.raises(CheckpointError, match="counted 1 releases that are not the checkpoint's 2"):
        train(other, grid, resume_from=tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr("flwr_regs.flower.checkpoints.write_atomically", no_space)
        strategy = private(checkpoint_dir=tmp_path)
        with pytest.raises(CheckpointError, match="training ends before the round's mean is used"):
            train(strategy, grid, resume_from=tmp_path)
    assert bits(strategy.arrays) == {
        n: a.tobytes() for n, a in latest(tmp_path).state["training"]["model"]["model"].items()
    }
    (tmp_path / LEDGER).write_text("{}")
    with pytest.raises(CheckpointError, match="not known what was released after round-000002"):
        train(private(checkpoint_dir=tmp_path), grid, resume_from=tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LEDGER).touch()
    with pytest.raises(CheckpointError, match="that ended before its first checkpoint"):
        train(private(checkpoint_dir=tmp_path / "other"), grid)


def test_other_loops_refuse_checkpoints(tmp_path: Path) -> None:
    strategy = OF["FedAvg"].build(checkpoint_dir=tmp_path)
    config, arrays = ConfigRecord(CONFIG), ArrayRecord(make_model().state_dict())
    strategy.prepare(3, train_config=config)
    with pytest.raises(ValueError, match="checkpoint_dir needs the strategy's own start"):
        strategy.configure_train(1, arrays, config, OF["FedAvg"].grid())
