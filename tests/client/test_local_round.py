"""The training loop: what it does with data, optimisers, odd models, and bad input."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.sampler import BatchSampler, RandomSampler, SubsetRandomSampler

import flwr_regs as fr
from flwr_regs import MOON, Ditto, FedSAM, FixedHead
from flwr_regs.chain import chain
from flwr_regs.client.local_training import LocalTraining, has_risen, local_round
from flwr_regs.client.train.batches import Pairs, count_examples
from tests.conftest import close, descend, make_clients, make_model
from tests.flower.clients.test_own_loop import without

FEDAVG = chain([])


def go(model: nn.Module, data: Any, **kwargs: Any) -> Any:
    kwargs = {"lr": 0.1, "epochs": 1, "device": "cpu", **kwargs}
    return local_round(model, FEDAVG, data, **kwargs)


class OwnSGD(torch.optim.Optimizer):
    """An optimiser as users write it: it expects gradients, and takes no closure, or calls none."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p -= self.defaults["lr"] * p.grad


class Idle(OwnSGD):
    def step(self, closure: Any = None) -> None:
        """Forget the closure, and everything else."""


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
        torch.optim.AdamW,
        OwnSGD,
    ],
)
def test_it_is_plain_pytorch_training_with_any_optimiser(optimizer: Any) -> None:
    data = make_clients()[1]
    model, reference = make_model(batch_norm=True), make_model(batch_norm=True)
    result = go(model, data, epochs=2, optimizer=optimizer)
    opt = optimizer(reference.parameters(), lr=0.1)
    descend(reference, opt, data * 2)
    close(result.state, reference.state_dict(), 0.0)
    assert result.num_steps == 6
    assert result.num_examples == 15
    assert result.examples_processed == 30


def test_a_shuffling_loader_shuffles_anew_on_each_pass() -> None:
    seen = []

    class Probe(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(x[:, 0].tolist()))
            return super().forward(x)

    data = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.zeros(12, dtype=torch.long))
    go(Probe(1, 2), DataLoader(data, batch_size=12, shuffle=True), epochs=3)
    assert len(set(seen)) == 3


def test_the_examples_are_those_of_the_data_set_whatever_a_loader_drops() -> None:
    data = TensorDataset(torch.zeros(10, 4), torch.zeros(10))

    def count(**settings: Any) -> int:
        return count_examples(Pairs(DataLoader(data, **settings)))

    assert count(batch_size=4) == 10
    assert count(batch_size=4, drop_last=True) == 10
    assert count(batch_size=4, sampler=SubsetRandomSampler([1, 2])) == 2
    sampler = BatchSampler(RandomSampler(data), 4, drop_last=True)
    assert count(batch_sampler=sampler) == 10
    assert count(batch_size=None, sampler=sampler) == 10
    assert count(batch_sampler=[[0, 1, 2], [7, 8]]) == 5  # it does not say what it samples from


@pytest.mark.parametrize("length", [{"epochs": 1}, {"epochs": None, "steps": 5}])
def test_no_data_is_named(length: dict[str, Any]) -> None:
    short = TensorDataset(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))
    for data in ([], DataLoader(short, batch_size=4, drop_last=True)):
        with pytest.raises(ValueError, match=r"no training data.*drop_last=True"):
            go(make_model(), data, **length)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="requires_grad"):
        go(make_model().requires_grad_(False), make_clients()[0])
    with pytest.raises(TypeError, match=r"give what it makes, CrossEntropyLoss\(\)"):
        go(make_model(), make_clients()[0], loss_fn=nn.CrossEntropyLoss)
    with pytest.raises(TypeError, match=r"loss_fn must be a function, .* or None, not 'ce'"):
        go(make_model(), make_clients()[0], loss_fn="ce")


def test_lbfgs_gets_its_closure() -> None:
    data = make_clients()[1][:1]
    sgd = go(make_model(), data, epochs=3)
    lbfgs = go(make_model(), data, epochs=3, optimizer=torch.optim.LBFGS)
    assert lbfgs.loss < sgd.loss
    assert lbfgs.examples_processed == 3 * 20 * 5  # every evaluation of the closure


def test_a_model_that_does_not_move_is_said() -> None:
    data = make_clients()[1]
    with pytest.warns(UserWarning, match="3 local steps have left the model where it began") as one:
        go(make_model(), data, optimizer=Idle)
    with pytest.warns(UserWarning, match="the model's outputs are probabilities") as other:
        go(nn.Sequential(make_model(), nn.Softmax(1)), data)
    assert len(one) == len(other) == 1
    loop = LocalTraining(model := make_model(), FEDAVG, data, lr=0.1, epochs=1, device="cpu")
    for x, y in loop.batches():  # as a loop that forgets its optimiser's step
        torch.autograd.backward(loop.objective(x, y))
        loop.correct()
    with pytest.warns(UserWarning, match="is the optimiser's step"):
        loop.finish()
    assert torch.equal(model[0].weight, make_model()[0].weight)
    loop = LocalTraining(make_model(), FEDAVG, data, lr=0.1, epochs=1, device="cpu")
    assert loop.finish(2).num_steps == 2  # of steps that it has not seen, nothing is said


def test_a_label_without_an_output_is_named_before_a_gpu_fails_on_it() -> None:
    """Its own error says nothing, and stays for all that follows."""
    (x, y), *_ = data = make_clients()[0]
    loop = LocalTraining(make_model(), FEDAVG, data, lr=0.1, epochs=1, device="cpu")
    loop.device = torch.device("cuda")
    with pytest.raises(ValueError, match=r"a label is .* but the model has 3 outputs") as refused:
        loop.objective(x, y + 3)
    assert "torch:" not in str(refused.value)


def test_an_iterable_dataset_is_counted_by_reading_it() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for _ in range(7):
                yield torch.ones(4, dtype=torch.float64), torch.tensor(1)

    result = go(make_model(), DataLoader(Stream(), batch_size=3))
    assert (result.num_steps, result.num_examples) == (3, 7)

    class Known(Stream):
        def __len__(self) -> int:
            return 7

    assert count_examples(Pairs(DataLoader(Known(), batch_size=3, drop_last=True))) == 7


def test_the_mean_loss_of_a_model_in_half_precision_does_not_overflow() -> None:
    def large(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * 0 + 60000

    data = [(x.half(), y) for x, y in make_clients()[0]]
    assert go(make_model(torch.float16), data, loss_fn=large).loss == pytest.approx(60000, rel=1e-3)


def test_what_a_term_holds_still_is_left_alone_by_any_optimiser_of_a_loop() -> None:
    """Also by one over all of the model, with weight decay and momentum; then the model is as before."""
    model, data = make_model(), make_clients()[2]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    training = LocalTraining(model, FixedHead(), data, lr=0.1, epochs=1, device="cpu")
    make = partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1)
    without("optimizer")(training, model, make)  # type: ignore[arg-type]
    result = training.finish()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("2.")
        assert p.requires_grad
    assert set(result.delta) == {"0.weight", "0.bias"}


@pytest.mark.parametrize(
    "terms", [(), FedSAM(0.05).term.terms, MOON(0.1).term.terms, Ditto(0.1).term.terms]
)
def test_what_a_round_held_is_freed_at_its_end(terms: Any) -> None:
    """A model that waits for Python's collection costs memory, and the collection time."""
    model, data = make_model(), make_clients()[0]
    freed = weakref.ref(model)
    gc.disable()
    try:
        result = local_round(model, chain(terms), data, lr=0.1, steps=3, device="cpu")
        del model
        assert freed() is None
        assert result.num_steps == 3
    finally:
        gc.enable()


@pytest.mark.parametrize("grid", [fr.StackedGrid, fr.InProcessGrid])
def test_a_first_round_whose_loss_rises_is_a_sign_of_divergence(grid: Any) -> None:
    """Not one that falls; and not a rise from almost nothing to little, as of a model that has learned."""
    for lr, signs in ((0.1, 0), (1e4, 1)):
        x, y = make_clients()[0][0]
        clients = fr.Clients(make_model, [(x, y)] * 3, batch_size=2, device="cpu")
        strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
        config = ConfigRecord({"lr": lr, "local-steps": 4})
        strategy.start(grid(clients), make_model().state_dict(), 2, train_config=config)
        said = [entry["divergence"] for entry in strategy.history if "divergence" in entry]
        assert len(said) == signs
        assert all("the loss of 3 of 3 clients rose" in text for text in said)
    assert [has_risen(*each) for each in ((5.0, 1e-3), (11.0, 0.9), (11.0, 1.2))] == [0, 1, 0]


def test_a_first_loss_that_is_no_number_is_said_to_come_from_the_model_or_the_loss() -> None:
    def lost(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output * float("nan"), targets)

    with pytest.raises(ValueError, match=r"first step is NaN .* not from the learning rate"):
        go(make_model(), make_clients()[0], loss_fn=lost)
