"""A method in a training loop of one's own equals the package's client; mistakes are refused."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice, product
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import flwr_regs as fr
from flwr_regs.client.local_training import LocalTraining, local_round
from flwr_regs.client.train.batches import seeded
from flwr_regs.flower.compat import identify
from flwr_regs.methods.personal.apfl import MixedModel
from flwr_regs.methods.personal.ditto import PersonalModel
from flwr_regs.server.population.population import PopulationError
from flwr_regs.testing import Method
from flwr_regs.testing.problem import app_of
from tests.conftest import QUIET, ROOT, close, make_clients, make_model, norm_model, run
from tests.laws import CASES

Loop = Callable[[fr.ClientRound, nn.Module, Any], None]


def plain_loop(
    loop: LocalTraining,
    model: nn.Module,
    make: Any,
    before_step: Callable[[Any, nn.Module], None] = lambda *_: None,
    scale: float = 1.0,
    left_out: Sequence[str] = (),
    batches: Iterable[Any] | None = None,
) -> None:
    """What anybody writes, with the three calls; under AMP with a scale; or it forgets some calls."""
    own = "optimizer" in left_out
    optimizer = make(model.parameters(), lr=loop.lr) if own else loop.optimizer(make)
    for inputs, targets in batches or loop.batches():
        optimizer.zero_grad()
        output = model(inputs)
        loss = cross_entropy(output, targets)
        targets = [targets] if "plain targets" in left_out else targets
        if "one batch a step" in left_out:
            loop.loss(loss, inputs, targets, output).backward(retain_graph=True)
        if "its result" in left_out:
            loop.loss(2 * loss, inputs, targets, output)
        elif "loss" not in left_out:
            loss = loop.loss(loss, inputs, targets, output)
        (loss * scale).backward()
        for p in model.parameters() if scale != 1.0 else ():
            assert p.grad is not None
            p.grad /= scale
        if "correct" not in left_out:
            loop.correct()
        if "plain step" in left_out:  # as trainers step that take a closure
            optimizer.step(partial(before_step, optimizer, model))
        else:
            before_step(optimizer, model)
            optimizer.step()


def scaled_loop(*given: Any) -> None:
    """As under AMP: the loss is scaled by a power of two, the gradients are unscaled, then clipped."""
    plain_loop(
        *given,
        before_step=lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
        scale=2.0**16,
    )


def without(*left_out: str) -> Loop:
    """A loop that forgets some of the calls."""
    return partial(plain_loop, left_out=left_out)


def own_app(
    method: Any,
    loop: Loop = plain_loop,
    model: Callable[[], nn.Module] = make_model,
    make: Any = torch.optim.SGD,
    n: int = 4,
    keeping: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> fr.RegClientApp:
    """A Message-API app whose train function is `loop`; `keeping`: what its clients keep, and where."""
    app, data, kept = fr.RegClientApp(), make_clients(n), keeping or {}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = model()
        batches = data[int(context.node_config["partition-id"])]
        round_ = fr.ClientRound(message, method, net, batches, device="cpu", **kept, **kwargs)
        loop(round_, net, make)
        for wrong in (True, "2.5", None):
            with pytest.raises(TypeError, match=r"'mine' must be a number, not (True|'2\.5'|None)"):
                round_.reply({"mine": wrong})
        return round_.reply({"mine": torch.tensor(2.5)})

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        net = model()
        fr.load_model(message, method, net, **kept)
        net.eval()
        batches = data[int(context.node_config["partition-id"])]
        with torch.no_grad():
            losses = [float(cross_entropy(net(x), y)) for x, y in batches]
        count = sum(len(y) for _, y in batches)
        metrics = MetricRecord({"loss": sum(losses) / len(losses), "num-examples": count})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def looped(strategy: Any, *given: Any, **how: Any) -> dict[str, Any]:
    """Train a method in a loop of one's own, made of what `own_app` takes; return the model."""
    app = own_app(getattr(fr, f"{type(strategy).__name__}Client"), *given, **how)
    return run(strategy, fr.RegClient, grid=fr.InProcessGrid(app, 4))


@pytest.mark.parametrize(
    ("case", "loop"),
    [
        *((case, plain_loop) for case in CASES[::12]),
        *((case, scaled_loop) for case in CASES[3::30]),
    ],
    ids=lambda v: v.name if isinstance(v, Method) else v.__name__,
)
def test_a_loop_of_ones_own_equals_the_client(case: Method, loop: Loop) -> None:
    settings = {**case.settings, "seed": 3, "fraction_train": 0.75}
    ours, theirs = case.strategy(**settings), case.strategy(**settings)
    want = run(theirs, case.client)
    got = run(ours, case.client, grid=fr.InProcessGrid(own_app(case.client, loop), 4))
    assert not any(e["failures"] for e in ours.history)
    close(got, want, 0.0 if loop is plain_loop else 1e-12)
    for a, b in zip(ours.history, theirs.history, strict=True):
        assert a["train_metrics"].pop("mine") == 2.5
        if loop is plain_loop:
            assert a["train_metrics"] == b["train_metrics"]
        for pid, told in a["evaluate"]["clients"].items():
            assert told["loss"] == pytest.approx(b["evaluate"]["clients"][pid]["loss"], abs=1e-9)


def test_a_metric_of_ones_own_may_weigh_the_clients_whatever_their_steps() -> None:
    """It is smaller than the number of steps."""
    own = fr.FedAvg(weighted_by_key="mine", seed=3, fraction_evaluate=0.0)
    close(looped(own), run(fr.FedAvg(weighting="uniform", seed=3), fr.FedAvgClient), 0.0)


OWN = {"user.number": 3, "user.text": "a", "user.bytes": b"b"}


def own_keys(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key.startswith("user.")}


class Reading(fr.Term):
    name: ClassVar[str] = "reading"
    seen: ClassVar[list[Any]] = []

    def correct(self, grads: Any, params: Any, ctx: fr.ClientContext) -> Any:
        self.seen.append(own_keys(ctx.config))
        return grads


def test_keys_of_ones_own_reach_every_place_untouched() -> None:
    class Client(fr.RegClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            Reading.seen.append(own_keys(config))
            return super().fit(parameters, config)

    def loop(round_: fr.ClientRound, model: nn.Module, make: Any) -> None:
        Reading.seen.append(own_keys(round_.config))
        assert round_.config["lr"] == 0.2
        plain_loop(round_, model, make)

    lists = {**OWN, "user.list": [1, 2]}
    grid = fr.InProcessGrid(own_app([Reading], loop), 4)
    for train, where in ((OWN, None), (lists, grid)):
        Reading.seen.clear()
        length = {"local-steps": 1, **train}
        clients = {"terms": [Reading]} if where is None else {"grid": where}
        run(fr.RegStrategy([Reading()], **QUIET), Client, rounds=1, train=length, **clients)
        assert Reading.seen == [train] * 8
    how: dict[str, Any] = {"train": {"local-steps": 1, **lists}, "terms": [Reading]}
    with pytest.raises(fr.RoundFailed, match=r"lists in \['user.list'\].*json.dumps"):
        run(fr.RegStrategy([Reading()], **QUIET), Client, rounds=1, **how)


def test_label_counts_are_told_only_where_the_app_tells_them() -> None:
    data = make_clients()

    def counts(context: Context) -> Sequence[int]:
        ours = data[int(context.node_config["partition-id"])]
        return torch.bincount(torch.cat([y for _, y in ours]), minlength=3).tolist()

    def app_with(label_counts: Any) -> fr.RegClientApp:
        app = fr.RegClientApp(label_counts=label_counts)
        app._registered_funcs |= own_app(fr.FedFORClient)._registered_funcs
        return app

    def strategy() -> fr.FedFOR:
        return fr.FedFOR(seed=3, cohorts="class-covering", fraction_train=0.5)

    ours, theirs = strategy(), strategy()
    run(ours, fr.FedFORClient, grid=fr.InProcessGrid(app_with(counts), 4))
    run(theirs, fr.FedFORClient, share_label_counts=True)
    assert [e["cohort"] for e in ours.history] == [e["cohort"] for e in theirs.history]
    with pytest.raises(PopulationError, match="need label counts"):
        run(strategy(), fr.FedFORClient, grid=fr.InProcessGrid(app_with(None), 4))


def too_long(*given: Any) -> None:
    for _ in range(2):
        plain_loop(*given)


def odd_loop(what: str, loop: fr.ClientRound, model: nn.Module, make: Any) -> None:
    """A loop with something beside the plain one, or, without a step of its optimiser, in place of it."""
    if what == "freezes":
        model.get_submodule("0").requires_grad_(False)
    if what in ("freezes", "replies"):
        plain_loop(loop, model, make)
        loop.reply()
        return
    if what == "lists metrics":
        loop.reply([1.0])  # type: ignore[arg-type]
    if what == "takes half a step":
        loop.reply(steps=0.5)  # type: ignore[arg-type]
    if what == "gives an optimiser":
        loop.optimizer(make(model.parameters(), lr=loop.lr))
    optimizer = loop.optimizer(make)
    for inputs, targets in loop.batches():
        output = model(inputs)
        reduction = "none" if what == "losses" else "mean"
        loss: Any = cross_entropy(output, targets, reduction=reduction)
        loss = loss.item() if what == "gives a number" else loss
        with torch.set_grad_enabled(what != "evaluates"):
            whole = loop.loss(loss, inputs, targets, output)
        if what == "overflows":  # AMP's scaler then leaves all steps out
            optimizer.zero_grad()
            whole = torch.inf * whole
        whole.backward()
        if what == "corrects late":
            optimizer.step()
        if what == "is Opacus's":
            vars(next(model.parameters()))["grad_sample"] = loss
        loop.correct()


@pytest.mark.parametrize(
    ("loop", "match"),
    [
        (partial(odd_loop, "freezes"), "the loop has frozen '0.weight': do so bef"),
        (partial(odd_loop, "replies"), r"finish\(\) or reply\(\) was called before"),
        (partial(odd_loop, "lists metrics"), r"the metrics must be a mapping, not \[1.0\]"),
        (partial(odd_loop, "takes half a step"), "steps must be a whole number .* not 0.5"),
        (partial(odd_loop, "gives an optimiser"), "optimizer must be .* not an instance of SGD"),
        (partial(odd_loop, "losses"), "the batch's mean loss, a tensor with one number, not"),
        (partial(odd_loop, "gives a number"), "a tensor with one number, not a float"),
        (partial(odd_loop, "evaluates"), r"loss\(\) is for training steps: in an evaluation"),
        (partial(odd_loop, "overflows"), r"inactive: \[0, 1, 2, 3\]"),
        (partial(odd_loop, "corrects late"), "before the optimiser's step, and this step is taken"),
        (partial(odd_loop, "adds up"), r"correct\(\) comes once for each step"),
        (partial(odd_loop, "is Opacus's"), r"anew in its optimiser's step.*optimizer.pre_step"),
        (without("loss"), "it saw no loss since"),
        (without("correct"), "has moved, but correct.. was never called"),
        (without("loss", "correct"), "has moved, but correct.. was never called"),
        (without("its result"), "backward.. did not go through what loss.. ret"),
        (without("optimizer"), "configures the client's optimiser"),
        (too_long, "8 local steps, but the round asked for 4"),
    ],
)
def test_mistakes_are_refused(loop: Loop, match: str) -> None:
    with pytest.raises(fr.RoundFailed, match=match):
        looped(fr.FedADC(0.5), loop)


def test_steps_in_an_exchange_without_training_are_refused() -> None:
    def trains(loop: fr.ClientRound, model: nn.Module, make: Any) -> None:
        plain_loop(loop, model, make, batches=make_clients()[0])

    with pytest.raises(fr.RoundFailed, match=r"the round asked for 0: .* straight to reply"):
        looped(fr.RFedAvgPlus(0.1), trains)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (fr.FedFORClient, "a loop of FedFORClient .* the strategy runs 'FedADC'"),
        ([fr.FirstOrder], "a loop of terms .first-order.* the strategy runs 'FedADC'"),
        (fr.FirstOrder, "a named client, such as FedFORClient, takes a list"),
        (fr.RegClient, "a named client, such as FedFORClient, takes a list"),
        ("FedADC", "a named client, such as FedFORClient, takes a list"),
    ],
)
def test_a_loop_of_another_method_is_refused(method: Any, match: str) -> None:
    grid = fr.InProcessGrid(own_app(method), 4)
    with pytest.raises(fr.RoundFailed, match=match):
        run(fr.FedADC(0.5), fr.FedADCClient, grid=grid)


def in_two_processes(*given: Any) -> None:
    wrapper = SimpleNamespace(process_group=SimpleNamespace(size=lambda: 2))
    with patch.object(nn.parallel.DistributedDataParallel, "_active_ddp_module", wrapper):
        plain_loop(*given)


def test_gradients_at_other_points_are_of_the_loops_own_loss() -> None:
    for loop, loss_fn, match in (
        (in_two_processes, cross_entropy, "this process's batches alone"),
        (without("one batch a step"), cross_entropy, "gradient accumulation does not show it"),
        (plain_loop, lambda *given: 2 * cross_entropy(*given), "give ClientRound, as loss_fn="),
    ):
        with pytest.raises(fr.RoundFailed, match=match):
            looped(fr.FedSAM(0.1), loop, loss_fn=loss_fn)


def test_a_loop_may_have_a_loss_that_loss_fn_cannot_take_where_no_method_asks_for_it() -> None:
    listed = without("plain targets")
    close(*(looped(fr.FedFOR(0.1, seed=3), loop) for loop in (listed, plain_loop)), 0.0)
    for method in (fr.FedCurv, fr.FedSAM, fr.Ditto):
        with pytest.raises(fr.RoundFailed, match="as loss_fn=, the loop's"):
            looped(method(0.1, seed=3), listed)


class Fails(fr.Term):
    def finish(self, delta: Any, ctx: Any) -> Any:
        ctx.mean_loss(ctx.start)
        raise OSError("no disk")


def test_an_error_behind_the_steps_is_shown_where_the_loss_reads_parameters() -> None:
    model = make_model()

    def loss_fn(output: Any, targets: Any) -> Any:
        return cross_entropy(output, targets) + next(model.parameters()).square().sum()

    how: dict[str, Any] = {"lr": 0.1, "steps": 1, "device": "cpu", "loss_fn": loss_fn}
    loop = LocalTraining(model, Fails(), make_clients()[0], **how)
    optimizer = loop.optimizer()
    for inputs, targets in loop.batches():
        output = model(inputs)
        loop.loss(loss_fn(output, targets), inputs, targets, output).backward()
        loop.correct()
        optimizer.step()
    with pytest.raises(OSError, match="no disk"):
        loop.finish()


class Layers(nn.Sequential):
    def forward(self, inputs: Any) -> Any:
        raise TypeError("call my layers")


def test_of_a_model_that_only_the_loop_can_call_it_is_said_that_the_method_calls_it() -> None:
    def by_layers(loop: fr.ClientRound, model: Any, make: Any) -> None:
        plain_loop(loop, nn.Sequential(*model), make)

    with pytest.raises(fr.RoundFailed, match="call my layers; the method calls the model itself"):
        looped(fr.SCAFFOLD(option=1, seed=3), by_layers, lambda: Layers(*make_model()))


@pytest.mark.parametrize("method", [fr.SCAFFOLD, fr.FedSMOO])
def test_a_step_that_amps_scaler_leaves_out_is_none(method: Any) -> None:
    def skipping(overflows: bool, loop: fr.ClientRound, model: nn.Module, make: Any) -> None:
        optimizer = loop.optimizer(make)
        for step, (inputs, targets) in enumerate(loop.batches()):
            if step or overflows:
                optimizer.zero_grad()
                output = model(inputs)
                loss = loop.loss(cross_entropy(output, targets), inputs, targets, output)
                (loss if step else torch.inf * loss).backward()
                loop.correct()
            if step:
                optimizer.step()

    ends = [looped(method(seed=3), partial(skipping, overflows)) for overflows in (True, False)]
    close(*ends, 1e-12)


def test_a_second_gradient_has_the_dropout_of_the_first_whoever_draws_the_batches() -> None:
    def loaded(loop: fr.ClientRound, *more: Any) -> None:
        with loop.seeded():
            plain_loop(loop, *more, batches=islice(cycle(loop._data), loop.num_steps))

    model = partial(norm_model, drop=0.5)
    grid = fr.InProcessGrid(own_app(fr.FedSAMClient, loaded, model), 4)
    got = run(fr.FedSAM(0.1, seed=3), fr.FedSAMClient, grid=grid, model=model)
    close(got, run(fr.FedSAM(0.1, seed=3), fr.FedSAMClient, model=model), 0.0)


@pytest.mark.parametrize("term", [PersonalModel(0.1), MixedModel()])
def test_an_own_model_trains_in_the_mode_of_the_steps_also_behind_an_evaluation(term: Any) -> None:
    def kept(evaluates: bool) -> dict[str, torch.Tensor]:
        model = norm_model(drop=0.5)
        loop = LocalTraining(model, term, make_clients()[0], lr=0.1, epochs=1, device="cpu")
        with seeded(1, loop.device):
            plain_loop(loop, model, torch.optim.SGD)
            model.train(not evaluates)
            return loop.finish().client

    want = kept(False)
    assert all(torch.equal(v, want[n]) for n, v in kept(True).items())


@pytest.mark.parametrize(
    "what", ["learning rate", "gradients after correct", "model before its fi", "model after a s"]
)
@pytest.mark.parametrize(
    ("method", "left_out"), [(fr.SCAFFOLD, ""), (fr.VRLSGD, ""), (fr.SCAFFOLD, "plain step")]
)
def test_other_steps_than_the_rate_times_the_gradient_are_refused_where_they_count(
    method: Any, left_out: str, what: str
) -> None:
    def changed(optimizer: Any, model: nn.Module) -> None:
        if what == "learning rate":
            optimizer.param_groups[0]["lr"] /= 2
        if what.startswith("gradients"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def loop(round_: fr.ClientRound, model: nn.Module, make: Any) -> None:
        if what.startswith("model before"):
            nn.init.ones_(next(model.parameters()))
        plain_loop(round_, model, make, before_step=changed, left_out=left_out)
        if what.startswith("model after"):
            nn.init.ones_(next(model.parameters()))

    with pytest.raises(fr.RoundFailed, match=f"plain SGD, but the loop changes the {what}"):
        looped(method(seed=3), loop)


@pytest.mark.parametrize("method", [fr.FedADC, fr.FedNova])
def test_a_schedule_within_a_round_is_refused_where_the_rate_counts(method: Any) -> None:
    def halved(optimizer: Any, _: nn.Module) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    with pytest.raises(fr.RoundFailed, match=f"{method.__name__} counts on the round's learning"):
        looped(method(seed=3), partial(plain_loop, before_step=halved))


def test_a_model_may_have_other_values_between_the_steps_and_may_write_to_its_own() -> None:
    def swaps(_: Any, model: nn.Module) -> None:  # as an evaluation of an average does
        values = [(p, p.detach().clone()) for p in model.parameters()]
        nn.init.ones_(values[0][0])
        with torch.no_grad():
            values[0][0].copy_(values[0][1])

    grid = fr.InProcessGrid(own_app(fr.SCAFFOLDClient, partial(plain_loop, before_step=swaps)), 4)
    close(*(run(fr.SCAFFOLD(seed=3), fr.SCAFFOLDClient, **of) for of in ({"grid": grid}, {})), 0.0)
    words = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 3))
    batches = [(torch.arange(5), torch.ones(5, dtype=torch.int64))] * 3
    local_round(words, fr.SCAFFOLD().term, batches, lr=0.1, epochs=1, device="cpu")


def test_a_train_function_or_a_mod_that_returns_nothing_is_told_so() -> None:
    app = fr.RegClientApp()
    app.train()(lambda message, context: None)  # type: ignore[arg-type,return-value]
    forgetful = fr.client_app(lambda _: fr.FedFORClient, mods=[lambda *_: None])
    for each in (app, forgetful):
        with pytest.raises(fr.RoundFailed, match="function, or a mod, returned None, expected a M"):
            run(fr.FedFOR(seed=3), fr.FedFORClient, grid=fr.InProcessGrid(each, 4))


def emptying(message: Message, context: Context, call_next: Any) -> Any:
    context.state = RecordDict()
    return call_next(message, context)


def test_a_mod_that_loses_what_came_beside_the_model_is_told_so() -> None:
    app = fr.client_app(lambda _: fr.FedFORClient(make_model(), *make_clients(2)), [emptying])
    with pytest.raises(fr.RoundFailed, match=r"emptied Context.state, where \['first-order.broadc"):
        run(fr.FedFOR(seed=3), fr.FedFORClient, grid=fr.InProcessGrid(app, 4))


def listless(message: Message, context: Context, call_next: Any) -> Any:
    entries = message.content["config"].items()
    message.content["config"] = ConfigRecord({k: v for k, v in entries if not isinstance(v, list)})
    return call_next(message, context)


def twice(message: Message, context: Context, call_next: Any) -> Any:
    call_next(message, context)
    return call_next(message, context)


@pytest.mark.parametrize(
    ("method", "mod"),
    [
        *product(["FedFOR", "SCAFFOLD", "FedADC", "RFedAvgPlus"], [twice]),
        *product(["FedFOR", "FedADC"], [listless]),
    ],
)
def test_a_mod_may_call_the_client_again_and_leave_lists_out(method: str, mod: Any) -> None:
    kind, client, ends = getattr(fr, method), getattr(fr, f"{method}Client"), []
    how: dict[str, Any] = {"FedADC": {"downlink": "delta"}, "RFedAvgPlus": {"lam": 0.1}}
    app: Any = app_of(client, make_clients())
    for mods in ([], [mod]):
        grid = fr.InProcessGrid(fr.client_app(app.client_fn, mods), 4)
        strategy = kind(seed=3, fraction_train=0.5, **how.get(method, {}))
        ends.append(run(strategy, client, grid=grid))
    close(*ends, 0.0)


def test_a_misspelt_setting_and_a_missing_function_are_named() -> None:
    for match, wrong in {
        r"no argument 'target'.*'target_key'": {"target": "y"},
        "ClientRound: train_mode must be True or False": {"train_mode": "eval"},
        "model must be a torch.nn.Module, not the class Linear": {"model": lambda: nn.Linear},
    }.items():
        with pytest.raises(fr.RoundFailed, match=match):
            looped(fr.FedFOR(seed=3), **wrong)
    app = own_app(fr.FedFORClient)
    del app._registered_funcs["evaluate.default"]
    with pytest.raises(fr.RoundFailed, match=r"@app.evaluate\(\), or .* fraction_evaluate=0"):
        run(fr.FedFOR(seed=3), fr.FedFORClient, grid=fr.InProcessGrid(app, 4))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("train", "expected 'arrays' and 'config' of a strategy"),
        ("evaluate", "trains; for 'evaluate' messages, use load_model"),
    ],
)
def test_a_message_of_another_strategy_or_kind_is_refused(kind: str, why: str) -> None:
    identify()  # else the test passes only behind another
    message = Message(RecordDict({"config": ConfigRecord()}), 1, kind)
    with pytest.raises(ValueError, match=why):
        fr.ClientRound(message, fr.FedFORClient, make_model(), make_clients()[0], device="cpu")
    why = "for 'train' messages, use ClientRound" if kind == "train" else "the message holds"
    with pytest.raises(ValueError, match=why):
        fr.load_model(message, fr.FedFORClient, make_model())


def test_the_model_may_be_moved_by_a_trainer() -> None:
    """As Lightning does in the end: parameters get new storage."""

    def moving(loop: fr.ClientRound, model: nn.Module, make: Any) -> None:
        plain_loop(loop, model, make)
        for p in model.parameters():
            p.data = p.data.clone()

    # FedADC shifts the start, so that it writes in the end
    want = run(fr.FedADC(beta=0.6, seed=3), fr.FedADCClient)
    close(looped(fr.FedADC(beta=0.6, seed=3), moving), want, 0.0)


def test_the_page_runs_as_written() -> None:
    """docs/own-loop.md, on the client of a run, with what it takes for granted filled in."""
    page = (ROOT / "docs" / "own-loop.md").read_text()
    client, server, *_ = re.findall(r"^```python\n(.*?)^```", page, flags=re.S | re.M)
    data = make_clients()
    names: dict[str, Any] = {
        "Net": make_model,
        "my_loader": lambda context: data[int(context.node_config["partition-id"])],
        "torch": torch,
        "cross_entropy": cross_entropy,
        "my_test": lambda model, context: (sum(float(p.sum()) for p in model.parameters()), 5),
    }
    exec(client, names)
    exec(server, names | {"grid": fr.InProcessGrid(names["app"], 4)}, told := {})
    history = told["strategy"].history
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in history)
    assert history[-1]["train_metrics"]["my-metric"] == 1.0
    losses = [e["evaluate"]["clients"][0]["loss"] for e in history]
    assert len(set(losses)) == 10  # the model moves, and is loaded


def test_labels_are_counted_with_the_rounds_seed() -> None:
    """A loader may draw its examples."""
    app, (x, y) = fr.RegClientApp(), make_clients()[0][0]
    loader = DataLoader(TensorDataset(x, y), sampler=WeightedRandomSampler([1.0] * len(y), 3))
    counts = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.rand(1)
        loop = fr.ClientRound(message, fr.FedRSClient, model := make_model(), loader, device="cpu")
        counts.append(loop._ctx.label_counts.tolist())
        plain_loop(loop, model, torch.optim.SGD)
        return loop.reply()

    for _ in range(3):
        strategy = fr.FedRS(seed=3, fraction_evaluate=0.0)
        run(strategy, fr.FedRSClient, rounds=1, grid=fr.InProcessGrid(app, 2))
    assert counts[:2] == counts[2:4] == counts[4:]
