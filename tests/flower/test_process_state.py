"""A training leaves the process as its user has it: collector, children, random states, threads."""

import gc
import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import flwr_regs as fr
from flwr_regs.testing.problem import app_of, make_clients, train
from flwr_regs.wire.arrays import digest
from tests.conftest import dropping


def process_state() -> dict[str, np.ndarray]:
    """What a process has once, for all of its code."""
    _, words, *place = np.random.get_state()  # noqa: NPY002
    return {
        "python's generator": np.array(random.getstate()[1]),
        "numpy's generator": np.array([*words, place[0]]),
        "torch's generator": torch.get_rng_state().numpy(),
        "collector": np.array([gc.isenabled(), *gc.get_threshold()]),
        "torch": np.array([torch.get_num_threads(), torch.is_grad_enabled()]),
        "dtype": np.array(torch.tensor(0.0).element_size()),
    }


def changed(before: dict[str, np.ndarray]) -> list[str]:
    return [k for k, value in process_state().items() if not np.array_equal(value, before[k])]


@pytest.mark.parametrize("kind", [fr.InProcessGrid, fr.StackedGrid])
def test_a_training_leaves_the_process_as_it_was(
    kind: type[fr.InProcessGrid], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also between its rounds, and if it ends by a callback's error."""

    def forbidden(*args: Any, **settings: Any) -> Any:
        raise AssertionError("this belongs to the process's user")

    for module, name in ((gc, "disable"), (gc, "freeze"), (os, "kill"), (os, "killpg")):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr(multiprocessing, "active_children", forbidden)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    before, handler, rounds = process_state(), signal.getsignal(signal.SIGTERM), list[int]()
    loaders = [DataLoader(batches, batch_size=None) for batches in make_clients()]

    def looks(number: int) -> None:
        assert not changed(before)
        rounds.append(number)
        if number == 3:
            raise KeyError("a user's own")

    grid = kind(app_of(fr.SCAFFOLDClient, loaders, dropping), len(loaders))
    strategy = fr.SCAFFOLD(seed=3, checkpoint_dir=tmp_path)
    with pytest.raises(KeyError, match="a user's own"):
        train(strategy, fr.SCAFFOLDClient, model=dropping, grid=grid, on_round=looks)
    assert rounds == [0, 1, 2, 3]
    assert not changed(before)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("shared", ["nothing", "the model", "the clients", "their model"])
@pytest.mark.parametrize("kind", [fr.InProcessGrid, fr.StackedGrid])
def test_trainings_in_two_threads_are_as_each_alone(
    kind: type[fr.InProcessGrid], shared: str
) -> None:
    before, models = torch.get_rng_state(), dict[str, list[str]]()
    model = dropping()
    clients = fr.Clients(model, make_clients(), make_clients(), device="cpu")

    def run(seed: int, where: str) -> None:
        data = [DataLoader(c, batch_size=None, shuffle=True) for c in make_clients()]
        net = (lambda: model) if shared == "the model" else dropping
        app: Any = clients if shared == "the clients" else app_of(fr.FedAvgClient, data, net)
        if shared == "their model":
            app = clients.app(fr.FedAvgClient) if seed == 1 else clients
        grid = kind(app, len(data))
        trained = train(fr.FedAvg(seed=seed), fr.FedAvgClient, model=dropping, grid=grid)
        models[f"{seed} {where}"] = [digest(state) for state in trained]

    threads = [threading.Thread(target=run, args=(seed, "in a thread")) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(torch.get_rng_state(), before)
    for seed in (1, 2):
        run(seed, "alone")
        assert models[f"{seed} in a thread"] == models[f"{seed} alone"]
