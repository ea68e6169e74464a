"""InProcessGrid with workers: the same bits as without, whatever the method, and whatever a client does."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr
from flwr_regs import InProcessGrid, client_app
from flwr_regs.flower.grids import workers
from flwr_regs.flower.node import failure
from flwr_regs.wire import worker_pool
from tests.conftest import ROOT, dropping, start, until
from tests.processes import pids_with

CLIENTS = 4
METHODS = ("RFedAvgPlus", pytest.param("FedBN", marks=pytest.mark.full), "SCAFFOLD")


class Counting(NumPyClient):
    """Counts its calls in the client's state."""

    def __init__(self, context: Context) -> None:
        self.state = context.state

    def fit(self, parameters: Any, config: Any) -> Any:
        n = int(self.state["n"]["n"]) + 1 if "n" in self.state else 1  # type: ignore[arg-type]
        self.state["n"] = ConfigRecord({"n": n})
        return parameters, 1, {"calls": n, "pid": os.getpid()}


class Elsewhere(fr.SCAFFOLDClient):
    """Trains by itself, since it has a `fit` of its own."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return super().fit(parameters, config)


def half_sent(connection: Any, *_: Any) -> None:
    """In place of sending its answer, the process is killed within it."""
    os.write(connection.fileno(), b"\0\0\0\x09half")  # of 9 bytes
    os.kill(os.getpid(), signal.SIGKILL)


def client_fn(context: Context) -> NumPyClient:
    """A client of the method that the run config names; it fails as that says."""
    pid, config = int(context.node_config["partition-id"]), context.run_config
    if config["method"] == "counting":
        return Counting(context)
    draw = torch.Generator().manual_seed(pid)
    x = torch.randn(20, 4, generator=draw).double()
    y = torch.randint(0, 3, (20,), generator=draw)
    data, test = (DataLoader(TensorDataset(x, y), 5, shuffle) for shuffle in (True, False))
    if config.get("kills"):
        os.kill(os.getppid(), signal.SIGKILL)
    if pid == 1 and config.get("raises"):
        raise OSError("no disk here")
    if pid == 2 and "dies" in config and Path(str(config["dies"])).exists():
        Path(str(config["dies"])).unlink()
        worker_pool.Connection.send = half_sent
    kind = getattr(fr, str(config["method"]) + "Client")
    if config.get("mixed"):  # two clients for a stack, and two that train by themselves
        calls = context.state.config_records.get("calls", {"n": 0})["n"]
        context.state["calls"] = ConfigRecord({"n": calls + 1})
        kind = kind if pid < 2 else Elsewhere
    return kind(dropping(), data, test, device="cpu")  # type: ignore[no-any-return]


def a_grid(number: int) -> InProcessGrid:
    return InProcessGrid(client_app(client_fn), CLIENTS, {"method": "FedAvg"}, workers=number)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[InProcessGrid, InProcessGrid]]:
    """Grids without and with workers, for all trainings: each has its own part of the clients' states."""
    grids = a_grid(1), a_grid(2)
    yield grids
    grids[1].close()


def pool(grid: InProcessGrid) -> list[Any]:
    assert grid._workers is not None
    return list(grid._workers.running.values())


def train(grid: InProcessGrid, method: str, rounds: int = 2, **settings: Any) -> Any:
    """Train with the clients' run config changed; return the result."""
    config = {"method": method, **settings.pop("clients", {})}
    for node in grid.get_node_ids():
        grid._contexts[node].run_config = config
    resume_from = settings.pop("resume_from", None)
    settings |= {"lam": 0.1} if method == "RFedAvgPlus" else {}
    strategy, config = getattr(fr, method)(seed=3, **settings), {"lr": 0.1, "local-epochs": 1}
    return start(strategy, grid, rounds, dropping, config, resume_from=resume_from)


def bits(result: Any, grid: InProcessGrid) -> Any:
    """The model, the metrics of each round, and all that clients keep; states of other trainings too."""
    metrics = [dict(r) for r in result.train_metrics_clientapp.values()]
    metrics += [dict(r) for r in result.evaluate_metrics_clientapp.values()]
    kept = [
        {
            key.split(".")[-1]: dict(record)
            for key, record in state.items()
            if key != "calls"  # a stacked grid makes a client once
        }
        for state in grid.snapshot().values()
    ]
    return {n: a.data for n, a in result.arrays.items()}, metrics, kept


@pytest.mark.parametrize("method", METHODS)
def test_workers_give_the_same_bits(method: str, pair: tuple[InProcessGrid, ...]) -> None:
    """Client 1 may fail."""
    more = {"clients": {"raises": method == "SCAFFOLD"}}
    one, two = (bits(train(grid, method, **more), grid) for grid in pair)
    assert one == two
    assert len(pool(pair[1])) == 2


def test_an_interrupted_run_ends_the_workers_and_is_resumed_with_the_same_bits(
    pair: tuple[InProcessGrid, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(pair[0], "SCAFFOLD", 3)
    train(pair[1], "SCAFFOLD", 2, checkpoint_dir=tmp_path)
    old = pool(pair[1])
    foreign = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,))
    foreign.start()  # a user's own child, such as a loader's worker

    def interrupted(connections: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            messages_to(pair[1], [3])
    assert len(old) == 2
    assert not pool(pair[1])
    assert not any(p.is_alive() for p in old)
    assert foreign.is_alive()
    foreign.kill()
    resumed = train(pair[1], "SCAFFOLD", 3, checkpoint_dir=tmp_path, resume_from=tmp_path)
    assert bits(whole, pair[0])[:2] == bits(resumed, pair[1])[:2]


def test_a_client_that_raises_has_the_error_that_it_has_without_workers(
    pair: tuple[InProcessGrid, ...],
) -> None:
    one, two = (messages_to(grid, [1], raises=True)[0] for grid in pair)
    assert one.error.reason == two.error.reason
    assert "no disk here" in str(one.error.reason)


def messages_to(grid: InProcessGrid, pids: list[int], **config: Any) -> list[Message]:
    """Send each client a train message as other strategies have it; return the replies."""
    nodes = list(grid.get_node_ids())
    for node in nodes:
        grid._contexts[node].run_config = {"method": "FedAvg" if config else "counting", **config}
    arrays = ArrayRecord(dropping().state_dict())
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    sent = [grid.create_message(content, "train", nodes[pid], "1") for pid in pids]
    return list(grid.send_and_receive(sent))


def test_messages_to_one_client_are_served_in_their_order(pair: tuple[InProcessGrid, ...]) -> None:
    replies = messages_to(pair[1], [0, 0, 1, 0, 1])
    metrics = [reply.content["metrics"] for reply in replies]
    assert [m["calls"] for m in metrics] == [1, 2, 1, 3, 2]
    assert os.getpid() not in {m["pid"] for m in metrics}


def test_clients_that_do_not_stack_go_to_the_workers_of_a_stacked_grid() -> None:
    """A client's state is as if `client_fn` had been called once; client 1 may raise there."""
    results = []
    for number in (1, 2):
        grid = fr.StackedGrid(client_app(client_fn), CLIENTS, workers=number)
        more = {"mixed": True, "raises": True}
        result = train(grid, "SCAFFOLD", rounds=3, clients=more)
        results.append((bits(result, grid), grid.fallbacks))
        if number == 2:
            assert len(pool(grid)) == 2
        grid.close()
    (alone, fallbacks), (spread, others) = results
    assert fallbacks == others
    assert sum(fallbacks.values()) == 9
    assert spread == alone


def test_a_killed_worker_costs_one_reply(
    pair: tuple[InProcessGrid, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, said = tmp_path / "die", list[str]()
    flag.touch()

    def failing(message: Message, error: Exception) -> Message:
        said.append(str(error))
        return failure(message, error)

    monkeypatch.setattr(workers, "failure", failing)
    result = train(pair[1], "SCAFFOLD", clients={"dies": str(flag)}, fraction_evaluate=0.0)
    assert said == ["the process of client 2 ended with exit code -9 (SIGKILL)"]
    assert len(result.train_metrics_clientapp) == 2
    assert [p.is_alive() for p in pool(pair[1])] == [True, True]
    assert messages_to(pair[1], [2])[0].content["metrics"]["calls"] == 1


def test_arrays_go_another_way_where_shared_memory_cannot_be_written(
    pair: tuple[InProcessGrid, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "SHARED", Path("/proc"))  # nobody makes folders there
    assert messages_to(pair[1], [0])[0].has_content()
    monkeypatch.undo()
    full = Mock(side_effect=[OSError(28, "full"), lambda: None])
    monkeypatch.setattr(worker_pool, "claim", full)
    assert messages_to(pair[1], [0])[0].has_content()


def test_arrays_are_read_and_not_mapped_on_windows_which_removes_no_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = multiprocessing.Pipe()
    worker_pool._send(ours, [str(tmp_path)], np.arange(3))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(worker_pool.mmap, "mmap")
    array = worker_pool._read(theirs)
    array += 1  # it can be written, as a mapped one
    assert array.tolist() == [1, 2, 3]
    assert not [*tmp_path.iterdir()]


def test_an_app_that_cannot_be_sent_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = client_app(lambda context: Counting(context))
    monkeypatch.setattr(worker_pool, "pickler", pickle)
    with pytest.raises(TypeError, match=r"workers=2: this app cannot be sent .* in a module"):
        InProcessGrid(app, 3, workers=2)
    with pytest.raises(ValueError, match="workers must be a whole number of at least 1, not"):
        InProcessGrid(client_app(client_fn), 3, workers=True)
    for no_app in (client_fn, fr.RegClient):
        with pytest.raises(TypeError, match=r"expected Clients or client_app\(client_fn\), not <"):
            InProcessGrid(no_app, 3)


def test_a_worker_that_cannot_read_its_script_says_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = worker_pool.WorkerPool(os._exit, 1, 1, "", "")  # as in a script without that line
    with pytest.raises(RuntimeError, match=r"if __name__ == '__main__'.*imports the script$"):
        [*ends.answers([0], lanes=[0])]
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", "<stdin>", raising=False
    )  # python < script.py
    with pytest.raises(
        RuntimeError, match="<stdin> cannot be imported: put the script into a file"
    ):
        [*ends.answers([0], lanes=[0])]


def test_a_process_that_may_start_no_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = vars(multiprocessing.current_process())["_config"]
    monkeypatch.setitem(config, "daemon", True)
    with pytest.raises(RuntimeError, match=r"workers=2: .* may start no others: use workers=1"):
        a_grid(2)


SCRIPT = """
from pathlib import Path
from flwr_regs.wire import worker_pool
from tests.flower.test_workers import a_grid, messages_to, pool
if __name__ == "__main__":
    worker_pool.SHARED = Path(__file__).parent
    grid = a_grid(2)
    messages_to(grid, [0, 1])
    print(*(p.pid for p in pool(grid)), flush=True)
    messages_to(grid, [0], kills=True)
"""


def test_no_worker_outlives_the_grids_process_and_the_next_grid_removes_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths, mark = os.pathsep.join([str(ROOT), *sys.path]), {"FLWR_REGS_TEST": str(tmp_path)}
    environment = {**os.environ, "PYTHONPATH": paths, **mark}
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=200
    )
    assert ran.returncode == -9, ran.stderr
    assert len(ran.stdout.split()) == 2
    until("the workers are gone", lambda: not pids_with(f"FLWR_REGS_TEST={tmp_path}"), 30)
    (left,) = tmp_path.glob("flwr-regs-*")
    monkeypatch.setattr(worker_pool, "SHARED", tmp_path)
    release = worker_pool.claim(left / ".lock")
    a_grid(2)
    assert left.is_dir()  # in use
    release()
    a_grid(2)
    assert not left.exists()
