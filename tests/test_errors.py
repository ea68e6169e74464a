"""A user's mistakes: each ends in one sentence that says what was given, what is expected, and where."""

import inspect
import math
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import flwr_regs as fr
from flwr_regs.client.local_training import local_round
from flwr_regs.methods.registry import METHODS
from flwr_regs.server.failures import name_failures
from flwr_regs.term import ParameterError
from tests.conftest import make_clients, make_model, run


def kind_of(value: Any) -> str:
    """A test's name: the same in each process, without addresses."""
    return "" if isinstance(value, str) and len(value) > 20 else type(value).__name__


# The frame that is named


def users_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, targets.reshape(-1, 7, 13))  # the user's line


def test_an_error_below_torch_names_the_users_line() -> None:
    data = make_clients()[0]
    app = fr.client_app(lambda _: fr.FedAvgClient(make_model(), data, loss_fn=users_loss))
    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
    with pytest.raises(fr.RoundFailed) as failed:
        run(strategy, fr.FedAvgClient, rounds=1, grid=fr.InProcessGrid(app, 3))
    assert failed.value.__cause__ is None
    assert failed.value.__context__ is None
    text = str(failed.value)
    line = inspect.getsourcelines(users_loss)[1] + 1
    expected = f"test_errors.py, line {line}: return torch.nn.functional.cross_entropy(output, "
    assert expected in text
    assert text.count("test_errors.py") == 1  # once for three clients
    assert "3 clients (partitions 0-2) failed: RuntimeError: " in text
    assert len(text.splitlines()) == 1
    assert set(strategy.history[-1]["failures"]) == {0, 1, 2}


def test_many_failures_are_named_in_a_few_lines() -> None:
    one = name_failures(dict.fromkeys([*range(12), 14, *range(20, 50, 2)], "no disk"))
    some = "0-11, 14, 20, 22, 24, 26, 28, 30, 32, 34, …"
    assert one == f"28 clients (partitions {some}) failed: no disk"
    same = name_failures({k: f"the reply of client {k}: its 'w' holds NaN" for k in (3, 4)})
    assert same == "2 clients (partitions 3-4) failed: the reply of the client: its 'w' holds NaN"
    assert name_failures({3: "no disk"}) == "1 client (partition 3) failed: no disk"
    many = name_failures({k: f"disk {k // 2} is full" for k in range(100)})
    lines = many.splitlines()
    assert lines[1] == "  2 clients (partitions 0-1) failed: disk 0 is full"
    assert lines[-1] == "  80 more clients failed with 40 other errors"
    assert len(lines) == 12


# What is no batches

X, Y = torch.zeros(6, 4, dtype=torch.float64), torch.arange(6) % 3
NO_BATCHES: list[tuple[Any, str]] = [
    (TensorDataset(X, Y), r"^{name} is a TensorDataset: expected .*such as DataLoader\({name}, b"),
    ([X, Y], r"^{name} is a list of arrays: expected .*DataLoader\(TensorDataset\(\*{name}\)"),
    ((X.numpy(), Y.numpy()), r"^{name} is a tuple of arrays: .*such as \[\(inputs, targets\)\]"),
    ({"x": X, "y": Y}, r"^{name} is a dict, which is one batch: .*such as \[{name}\]"),
    (iter([(X, Y)]), r"^{name} is a list_iterator, which can be iterated only once: .*again"),
]


@pytest.mark.parametrize(
    ("wrong", "match"), [*NO_BATCHES, (None, r"^{name} is None: expected batches")], ids=kind_of
)
def test_what_is_no_batches_is_refused_at_construction(wrong: Any, match: str) -> None:
    good = [(X, Y)]
    match = match.replace("{name}", "train_data")
    with pytest.raises(TypeError, match=match):
        fr.FedAvgClient(make_model(), wrong)
    with pytest.raises(TypeError, match=match):
        local_round(make_model(), fr.Proximal(0.1), wrong, lr=0.1, epochs=1)
    if wrong is not None:  # no eval_data
        with pytest.raises(TypeError, match=match.replace("train_data", "eval_data")):
            fr.FedAvgClient(make_model(), good, wrong)


def test_batches_that_run_out_are_named() -> None:
    class Once:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return iter([(X, Y)] if self.passes == 1 else [])

    with pytest.raises(ValueError, match=r"pass 2 over train_data, a Once, yields no batch"):
        local_round(make_model(), fr.Proximal(0.1), Once(), lr=0.1, steps=3, device="cpu")


# Terms

TERMS: list[tuple[Any, Any, str]] = [
    (fr.RegStrategy, fr.Proximal(0.1), "takes a list of terms, such as .*, not the term Prox"),
    (fr.RegStrategy, [fr.Proximal], "terms are instances.*, not the class Proximal .a client's"),
    (fr.RegStrategy, [fr.FedProx(0.1)], "terms are instances.*, not the strategy FedProx; give"),
    (fr.RegStrategy, [fr.Proximal(0.1), "x"], "terms are instances.*, not 'x'"),
    (fr.RegClient, fr.Proximal, "takes a list of classes of terms, .*, not the class Proximal"),
    (fr.RegClient, [fr.Proximal(0.1)], "takes classes.*hyper-parameters come from the strat"),
]


@pytest.mark.parametrize(("taker", "wrong", "match"), TERMS, ids=kind_of)
def test_terms_are_a_list_of_instances_or_a_clients_of_classes(
    taker: Any, wrong: Any, match: str
) -> None:
    data = () if taker is fr.RegStrategy else (make_model(), [(X, Y)])
    with pytest.raises(TypeError, match=f"^{taker.__name__}('s)? {match}"):
        taker(*data, terms=wrong)


def test_no_term_is_fedavg() -> None:  # a list that a program makes may be empty
    assert fr.RegStrategy([]).method_name == "FedAvg"


# Names


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("FedAvgg", "FedAvg"), ("fedavg", "FedAvg"), ("FEDFORClient", "FedFORClient")],
)
def test_a_misspelt_name_is_named_with_what_was_meant(wrong: str, meant: str) -> None:
    expected = f"module 'flwr_regs' has no attribute '{wrong}'; did you mean '{meant}'"
    with pytest.raises(AttributeError, match=expected):
        getattr(fr, wrong)
    with pytest.raises(ImportError, match=f"cannot import name '{wrong}'"):
        exec(f"from flwr_regs import {wrong}")


# Hyper-parameters

WRONG: tuple[Any, ...] = ("0.1", [0.1], math.nan, math.inf, True, object())


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_hyper_parameter_is_named_with_its_term(method: str) -> None:
    strategy = eval(METHODS[method].example, {method: getattr(fr, method)})
    for term in strategy.term.terms:
        numbers = [f for f in fields(term) if isinstance(getattr(term, f.name), int | float)]
        for f, wrong in product(numbers, WRONG):
            if wrong is True and isinstance(getattr(term, f.name), bool):
                continue
            with pytest.raises(ParameterError) as refused:
                replace(term, **{f.name: wrong})
            text = str(refused.value)
            assert text.startswith(f"{type(term).__name__}: {f.name} must be "), text
            assert text.endswith(f"not {wrong!r}"), text


def test_a_term_and_a_users_own_method_are_named_too() -> None:
    class Mine(fr.FedProx):
        def __init__(self, mu: float, **kwargs: Any) -> None:
            super().__init__(mu, **kwargs)

    with pytest.raises(ValueError, match=r"^Mine: mu must be a number of at least 0, not '1'$"):
        Mine("1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid learning rate"):  # torch's own words
        fr.FedOpt("SGD", lr=-1.0)
