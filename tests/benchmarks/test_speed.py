"""The measurements of speed: each runs, and its sides do the same job."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flwr_regs as fr
from benchmarks.speed import __main__ as command
from benchmarks.speed import aggregation, clients, jobs, peers, report, step, targets
from benchmarks.speed.timing import QUICK, interleaved, ratios, spread
from flwr_regs.experiments.run.resources import Taken

IN_PROCESS = [name for name in command.PARTS if name != "ray"]


def numbers(value: Any) -> list[float]:
    """All numbers in a nested value."""
    if isinstance(value, dict):
        return [x for part in value.values() for x in numbers(part)]
    return [float(value)] if isinstance(value, int | float) else []


def finished(names: list[str], out: Path) -> dict[str, Any]:
    """Measure quickly through the command; return the results by part."""
    assert command.main(["measure", *names, "--quick", "--json", str(out)]) == 0
    parts: dict[str, Any] = json.loads(out.read_text())["now"]
    assert set(parts) >= set(names)
    return parts


def checked(rows: list[dict[str, Any]]) -> None:
    """Rows hold figures, all of them finite, or say why there are none."""
    assert rows
    for row in rows:
        if "skipped" in row:
            assert row["skipped"]
            continue
        figures = numbers(row)
        assert figures
        assert all(map(math.isfinite, figures)), row
        assert row.get("seconds", {"median": 1})["median"] > 0


@pytest.mark.full
def test_every_part_measures_quickly_and_reports(tmp_path: Path) -> None:
    found = finished(IN_PROCESS, tmp_path / "speed.json")
    for part in found.values():
        checked(part["rows"])
        assert part["machine"]["torch"] == torch.__version__.partition("+")[0] or part["machine"]
    assert {row["side"] for row in found["step"]["rows"]} >= {"bare", *step.METHODS, "FedADCPlus"}
    assert {row["what"] for row in found["growth"]["rows"]} == {
        "cohort",
        "parameters",
        "population",
    }
    assert {row["side"] for row in found["peers"]["rows"]} >= set(peers.NAMES.values())
    tables = report.tables({"now": found, "before": {"step": found["step"]}})
    assert "x bare, before | x bare, now" in tables["step"]
    assert "not measured" in tables["targets"]
    assert tables["ray"] == "*not measured*"
    report.draw({"now": found}, tmp_path / "made.png")


@pytest.mark.flower
def test_rays_part_measures_quickly(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (row,) = finished(["ray"], tmp_path / "speed.json")["ray"]["rows"]
    checked([row])
    assert "skipped" not in row
    assert row["memory-last"] > 2**20


def test_a_part_is_kept_when_it_is_done_and_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "speed.json"

    def broken(_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(clients, "measure", broken)
    assert command.measure(["clients", "codec"], out, "before", quick=True) == ["clients"]
    assert command.measure(["codec"], out, "now", quick=True) == []
    found = json.loads(out.read_text())
    assert {tag: list(parts) for tag, parts in found.items()} == {
        "before": ["codec"],
        "now": ["codec"],
    }


def test_all_sides_of_a_client_take_the_same_steps() -> None:
    """One epoch over one batch a client, where all orders are one: the same model from all of them."""
    grid = fr.InProcessGrid(jobs.app("FedAvg", steps=1), 3)
    start = jobs.small()
    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
    jobs.rounds(strategy, grid, start, 1, jobs.train_config(1))
    mean = {n: torch.zeros_like(p) for n, p in start.named_parameters()}
    for pid in range(3):
        model = jobs.copied(start)
        x, y = jobs.loader(pid, 1).dataset.tensors  # type: ignore[attr-defined]
        jobs.bare_steps(model, [(x, y)])
        loss = torch.nn.functional.cross_entropy(
            torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y
        )
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for (n, p), g in zip(model.named_parameters(), grads, strict=True):
            mean[n] += (p - jobs.LR * g).detach() / 3
    for n, a in strategy.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(a, mean[n])


def test_ours_and_flowers_average_the_same_replies_to_the_same_model() -> None:
    model, method = jobs.wide(500), partial(fr.FedAvg, seed=1, fraction_evaluate=0.0)
    theirs, ours = aggregation.Flowers(model, 4), aggregation.Replies(method, model, 4)
    want, _ = theirs.strategy.aggregate_train(1, theirs.replies)
    ours.end(ours.next())
    assert want is not None
    for n, a in ours.arrays.items():
        np.testing.assert_allclose(a.numpy(), want[n].numpy(), rtol=1e-6, atol=1e-7)


def test_sides_take_turns_in_changing_order() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return 2.0 if name == "b" else 1.0

    found = interleaved({n: partial(side, n) for n in "ab"}, QUICK)
    assert order == ["a", "b", "a", "b", "b", "a"]  # once each before, then two turns
    assert ratios(found["b"], found["a"]) == {"median": 2, "low": 2, "high": 2, "count": 2}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3, "low": 2, "high": 4, "count": 5}


def test_a_target_reads_its_figure() -> None:
    """And says nothing where nothing was measured."""

    def rows(*seconds: float) -> dict[str, Any]:
        sizes = zip((1000, 100_000), seconds, strict=True)
        growth = [
            {"what": "population", "grid": "g", "size": n, "seconds": {"median": s}}
            for n, s in sizes
        ]
        return {"now": {"growth": {"rows": growth}}}

    (target,) = (t for t in targets.TARGETS if "1,000 of 100,000 clients" in t.says)
    assert target.value(rows(2.0, 3.0), "now") == pytest.approx(1.5)
    assert target.met(1.0)
    assert not target.met(1.5)
    assert [t.value(rows(2.0, 3.0), "now") for t in targets.TARGETS].count(None) > 1


def test_a_gpus_share_is_the_memory_with_a_margin_rounded_up() -> None:
    assert Taken(1.0, 1, 10 * 2**30, 100 * 2**30).gpus == 0.12
    assert Taken(1.0, 1, 1, 100 * 2**30).gpus == 0.01
    assert Taken(1.0, 1, 95 * 2**30, 100 * 2**30).gpus == 1.0
    text = Taken(0.5, 2**30, 10 * 2**30, 100 * 2**30).text(10)
    assert "8 clients at a time" in text
    assert "num-supernodes=10 client-resources-num-cpus=1 client-resources-num-gpus=0.12" in text
    assert "no CUDA GPU" in Taken(0.5, 2**30).text(10)
