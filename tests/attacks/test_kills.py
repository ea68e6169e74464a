"""Processes that are killed at random moments, and files that are damaged: equal bits, or one sentence.

A killed process is a fork of this one, so that a hundred of them need not import torch. By default a few
kills and damages are played; ``-m full`` plays them in bulk.
"""

import contextlib
import cProfile
import gc
import io
import os
import random
import shutil
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_regs import DynamicRegulariser
from flwr_regs.chain import chain
from flwr_regs.experiments.cli import main
from flwr_regs.experiments.report import run_records as records
from flwr_regs.server.checkpoint.checkpoint import Folder, latest, rounds_in
from flwr_regs.server.options import Options
from flwr_regs.server.training import Training
from tests.attacks.harness import play
from tests.conftest import bits
from tests.experiments.test_commands import CARD
from tests.experiments.test_user_code import OWN
from tests.server.network import NumpyNetwork, quadratic, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and kills")
BULK = [pytest.mark.full, pytest.mark.timeout(3000)]
WORDS = ["methods=EFL(0.1, density_up=0.1)", "num-clients=3", "examples-per-client=20", "rounds=5"]
WORDS += ["local-epochs=1", "seed=7"]


def killed(work: Callable[[], object], moment: float) -> bool:
    """Run `work` in a process of its own; whether it was killed after `moment` seconds."""
    pid = os.fork()
    if not pid:
        status = 1
        with contextlib.suppress(BaseException), Path(os.devnull).open("w") as nowhere:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                work()
            status = 0
        os._exit(status)
    end = time.monotonic() + moment
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def kill_until_done(
    work: Callable[[Path], Any], seed: int, seconds: float, times: int
) -> Iterator[tuple[Path, Any]]:
    """Yield folders and what `work` returned there at its end: it was killed at random moments before.

    Up to five times in a folder, until it has been killed so many `times`.
    """
    rng, kills, number = random.Random(seed), 0, 0
    while kills < times:
        number += 1
        folder, left = Path(f"{number}"), 5
        while left and killed(partial(work, folder), rng.uniform(0, seconds)):
            left -= 1
        kills += 5 - left
        yield folder, work(folder)
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of a short run would go into them."""
    monkeypatch.setattr("flwr_regs.experiments.report.drawing.save", lambda *_: [])
    monkeypatch.setattr("flwr_regs.experiments.report.results.Results._picture", lambda *_: None)


def models(folder: Path) -> dict[str, bytes]:
    """The final models of a results folder, and the accuracies of its runs."""
    found = [p for p in folder.rglob("*.safetensors") if "checkpoints" not in p.parts]
    out = {str(p.relative_to(folder)): p.read_bytes() for p in found}
    lines = {p: records.read(p) for p in folder.rglob("runs/*.jsonl")}
    return out | {str(p.relative_to(folder)): repr(r.accuracy).encode() for p, r in lines.items()}


@pytest.mark.parametrize(
    ("command", "times"), [("run", 2), *(pytest.param(c, 30, marks=BULK) for c in ("run", "bench"))]
)
def test_a_command_that_is_killed_and_resumed_gives_equal_bits(
    command: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("card.toml").write_text(CARD)
    Path("mine.py").write_text(OWN)
    line = ["bench", "card.toml", "--panels", "two", "--seeds", "1"]
    if command == "run":
        line = ["run", *WORDS, "checkpoint-every=0.001"]

    def work(folder: Path) -> None:
        begun = (folder / "experiment.toml").exists()
        main([command, "--resume", str(folder)] if begun else [*line, f"out={folder}"])

    work(Path("whole"))
    began = time.monotonic()  # nothing is imported any more
    work(Path("again"))
    seconds, want = time.monotonic() - began, models(Path("whole"))
    assert want
    for folder, _ in kill_until_done(work, 12, 1.5 * seconds, times):
        assert models(folder) == want


def damaged(path: Path, others: list[Path], rng: random.Random) -> str:
    """Damage a file in one of four ways; return the way."""
    way = rng.choice(["truncated", "flipped", "swapped", "missing"])
    data = path.read_bytes()
    if way == "missing":
        path.unlink()
    elif way == "swapped":
        other = rng.choice(others)
        mine, its = data, other.read_bytes()
        other.write_bytes(mine)
        path.write_bytes(its)
    elif way == "truncated":
        path.write_bytes(data[: rng.randrange(len(data))] if data else b"")
    else:
        spoilt = bytearray(data or b"\0")
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(spoilt))
    return f"{path.name} {way}"


@pytest.mark.parametrize("times", [3, pytest.param(40, marks=BULK)])
def test_a_damaged_results_folder_is_trained_again_or_refused_in_a_sentence(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is shown of it is of the runs that it holds."""
    monkeypatch.chdir(tmp_path)
    main(["run", *WORDS[1:3], *WORDS[4:], "methods=FedAvg,FedFOR", "rounds=2", "out=good"])
    want, rng = models(Path("good")), random.Random(14)
    for _ in range(times):
        shutil.copytree("good", "bad")
        files = [p for p in Path("bad").rglob("*") if p.suffix in (".jsonl", ".toml")]
        how = damaged(rng.choice(files), files, rng)
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                status = main(["run", "--resume", "bad"])
            except SystemExit as error:
                status = int(error.code or 0)
        assert "Traceback" not in text.getvalue(), (how, text.getvalue())
        if status == 0:
            got = models(Path("bad"))
            assert all(got[n] == want[n] for n in want.keys() & got.keys()), how
            assert got.keys() >= want.keys() or "experiment.toml" in how, how
        else:
            assert len(text.getvalue().strip()) < 2000, how
        shutil.rmtree("bad")


def test_a_disk_that_is_full_leaves_the_run_and_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One checkpoint fails; the model is the same. What each write may leave: test_checkpoint.py."""
    whole, real = play("FedADC", rounds=3).strategy, os.open

    def full(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT and "round-000002" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", full)
    strategy = play("FedADC", rounds=3, checkpoint_dir=tmp_path).strategy
    assert bits(strategy.arrays) == bits(whole.arrays)
    (why,) = (e["checkpoint"] for e in strategy.history if "checkpoint" in e)
    assert "No space left on device" in why
    assert sorted(rounds_in(tmp_path)) == [1, 3]


def calls_of(work: Callable[[], object]) -> int:
    """How many functions `work` calls: its time, whatever else the machine does."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(of.callcount for of in profile.getstats())


@pytest.mark.parametrize(
    ("rounds", "clients", "share"), [(80, 20, 0.3), pytest.param(400, 2000, 0.025, marks=BULK)]
)
def test_memory_and_checkpoints_do_not_grow_with_the_round(
    rounds: int, clients: int, share: float, tmp_path: Path
) -> None:
    """Once all clients have taken part, and kept something; but for the history, a line a round."""
    network = NumpyNetwork(clients, quadratic([1.0] * clients, [0.5] * clients))
    options = Options.of(chain([DynamicRegulariser(0.1)]), seed=3, fraction_train=share)
    train = Training(options, "FedDyn", {"w": np.zeros(500)}, rounds, lambda *_: {})
    folder = Folder(tmp_path)
    calls, sizes, memory = {}, {}, {}
    half, late = rounds // 2, rounds - rounds // 4  # all that is kept is replaced between the two
    for number in range(1, rounds + 1):
        if number == half:
            tracemalloc.start()
        run(train.round(number, {"lr": 0.1, "local-steps": 1}, network), network)
        network.asked.clear()
        save = partial(folder.save, number, train.snapshot(), train.history[-1:])
        if number in (half, late, rounds):
            calls[number] = calls_of(save)
            sizes[number] = latest(tmp_path).path.stat().st_size
            gc.collect()
            memory[number] = tracemalloc.get_traced_memory()[0]
        else:
            save()
        train.history.clear()
    tracemalloc.stop()
    folder.close()
    print(f"calls {calls}, bytes {sizes}, memory in use {memory}")
    assert sizes[rounds] < 1.03 * sizes[half]
    assert calls[rounds] < 1.03 * calls[half]
    assert memory[rounds] < 1.1 * memory[late] + 10_000
