"""The comparison's models: the layers of digits and MNIST to the bit, and any other shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flwr_regs import simulate
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.models import architectures as catalogue
from flwr_regs.experiments.models import models
from flwr_regs.experiments.models.body import model
from flwr_regs.experiments.models.residual import Block


def relu(*layers: nn.Module) -> list[nn.Module]:
    """The layers, each with a ReLU behind it."""
    return [m for layer in layers for m in (layer, nn.ReLU())]


def conv(before: int, after: int, kernel: int) -> list[nn.Module]:
    return [*relu(nn.Conv2d(before, after, kernel, padding=kernel // 2)), nn.MaxPool2d(2)]


def conv_bn(before: int, after: int) -> list[nn.Module]:
    layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return [layer, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]


def dense_bn(inputs: int) -> list[nn.Module]:
    hidden = [nn.Linear(inputs, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()]
    return [nn.Flatten(), *hidden, nn.Linear(128, 10)]


LAYERS: dict[tuple[str, str], Any] = {
    ("digits", "mlp"): lambda: [nn.Flatten(), *relu(nn.Linear(64, 64)), nn.Linear(64, 10)],
    ("mnist", "mlp"): lambda: [
        *(nn.Flatten(), *relu(nn.Linear(784, 200), nn.Linear(200, 200)), nn.Linear(200, 10)),
    ],
    ("digits", "cnn"): lambda: [
        *(*conv(1, 16, 3), *conv(16, 32, 3), nn.Flatten()),
        *(*relu(nn.Linear(128, 128)), nn.Linear(128, 10)),
    ],
    ("mnist", "cnn"): lambda: [
        *(*conv(1, 32, 5), *conv(32, 64, 5), nn.Flatten()),
        *(*relu(nn.Linear(3136, 512)), nn.Linear(512, 10)),
    ],
    ("digits", "cnn-bn"): lambda: [*conv_bn(1, 16), *conv_bn(16, 32), *dense_bn(128)],
    ("mnist", "cnn-bn"): lambda: [*conv_bn(1, 16), *conv_bn(16, 32), *dense_bn(1568)],
}
AUTO = {"digits": "mlp", "mnist": "cnn", "digits-domains": "cnn-bn", "mnist-domains": "cnn-bn"}


@pytest.mark.parametrize(("dataset", "kind"), LAYERS)
def test_the_packages_data_have_these_layers_and_weights(dataset: str, kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        want = nn.Sequential(*LAYERS[dataset, kind]())
    before = torch.get_rng_state()
    for named in [kind, *(["auto"] if AUTO[dataset] == kind else [])]:
        got = models.check(dataset, named, 3)
        assert [type(m) for m in got] == [type(m) for m in want]
        assert all(module.training for module in models.build(dataset, named, 3).modules())
        pairs = zip(got.state_dict().items(), want.state_dict().items(), strict=True)
        for (name, a), (other, b) in pairs:
            assert (name, a.tolist()) == (other, b.tolist())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set of given inputs, under the reference x.py:load."""

    def use(shape: tuple[int, ...], dtype: Any = np.float32, classes: int = 3, **more: Any) -> None:
        parts = (np.ones((classes, *shape), dtype), np.arange(classes)) * 2
        for module in (data, models):
            monkeypatch.setattr(module, "load", lambda *_: data.Data(*parts, **more))

    return use


@pytest.mark.parametrize(
    ("shape", "auto"), [((5,), "mlp"), ((3, 8, 9), "mlp"), ((3, 16, 16), "cnn")]
)
def test_a_model_is_made_for_the_datas_shape(shape: Any, auto: str, shaped: Any) -> None:
    shaped(shape)
    names = models.build("x.py:load", "auto", 0).state_dict().keys()
    for kind in ("mlp", "cnn", "cnn-bn"):
        if kind != "mlp" and len(shape) == 1:
            with pytest.raises(ValueError, match=r"8 x 8; an input of dataset 'x.py:load' has"):
                models.check("x.py:load", kind, 0)
            continue
        built = models.check("x.py:load", kind, 0)
        assert built(torch.zeros(2, *shape)).shape == (2, 3)
        assert (built.state_dict().keys() == names) == (kind == auto)
        if kind == "cnn":  # auto takes it where it is McMahan et al.'s
            assert (built[0].kernel_size == (5, 5)) == (auto == "cnn")


def test_the_packages_models_refuse_other_inputs(shaped: Any) -> None:
    shaped((1, 28, 28), np.uint8)
    with pytest.raises(
        ValueError, match=r"'mlp' needs inputs of floats.* has uint8.*as in x / 255"
    ):
        models.build("x.py:load", "mlp", 0)
    shaped((1, 28, 28))
    with pytest.raises(
        ValueError, match=r"'char-lstm' needs sequences of integers, shape \(length"
    ):
        models.build("x.py:load", "char-lstm", 0)
    with pytest.raises(ValueError, match="'projection' does not go with your own model"):
        models.build("x.py:load", "mine.py:Net", 0, projection=8)


STATED = {
    "mlp": 199_210,  # McMahan et al. 2017, Sec. 3
    "cnn": 1_663_370,  # the same
    "resnet20": 269_722,  # He et al. 2016, Tab. 6: 0.27 million
    "vgg11": 865_482,  # Sattler et al. 2020, Tab. II
    "resnet50": 25_557_032,  # torchvision's page of the model
    "mobilenetv2-gn": 3_504_872,  # the same; GroupNorm has as many as BatchNorm
    "alexnet": 57_044_810 + 2 * 9344,  # torchvision's for 10 classes, and BatchNorm
    "char-lstm": 820_522 - 10 * 265 + 2048,  # Reddi et al. 2021, Tab. 9: 90 characters, one bias
}


@pytest.mark.parametrize("name", STATED)
def test_a_model_has_as_many_parameters_as_its_source_states(name: str) -> None:
    net = catalogue.NETS[name]
    with torch.device("meta"):
        made = model(net.make(net.classes if net.words else net.example), net.classes)
    assert sum(p.numel() for p in made.parameters()) == STATED[name]


SHAPES = {"vgg11": (3, 32, 32), "mobilenetv2-gn": (3, 32, 32)}


@pytest.mark.parametrize(
    ("name", "projection"),
    [
        *(("mlp", 0), ("lenet", 6), ("cnn-4-4", 0), ("vgg9", 6), ("vgg11", 0), ("resnet8", 6)),
        *(("resnet18-gn", 0), ("mobilenetv2-gn", 6), ("digits-convnet", 0), ("char-lstm", 6)),
        ("sentiment-lstm", 0),
    ],
)
def test_a_step_moves_every_parameter(name: str, projection: int, shaped: Any) -> None:
    """On the data's shape, classes and vocabulary; a head is drawn after the body."""
    words = catalogue.NETS[name].words
    shape = (7,) if words else SHAPES.get(name, (1, 20, 16))
    shaped(shape, *((np.int64,) if words else ()), classes=4)
    model = models.check("x.py:load", name, 1, projection=projection)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.manual_seed(0)
    x = torch.randint(0, 4, (6, *shape)) if words else torch.randn(6, *shape)
    nn.functional.cross_entropy(model(x), torch.arange(6) % 4).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    plain = dict(models.build("x.py:load", name, 1).named_parameters())
    assert len(before.keys() & plain.keys()) == len(plain) - 2 * bool(projection)
    for n, p in model.named_parameters():
        assert n not in plain or torch.equal(plain[n], before[n])
        cancelled = n.endswith("bias") and "norm" not in type(model).__name__.lower()
        assert cancelled or not torch.equal(p, before[n]), n
    layers = dict(model.named_modules())
    assert ("projection" in layers) == bool(projection)
    if projection:
        head, output = layers["projection"], layers["classifier"]
        assert [type(m) for m in head] == [nn.Linear, nn.ReLU, nn.Linear]
        assert head[0].in_features == head[0].out_features
        assert (head[2].out_features, output.in_features) == (6, 6)


def test_small_images_are_not_shrunk_by_the_first_layers(shaped: Any) -> None:
    for side, stride in ((32, 1), (64, 2)):
        shaped((3, side, side))
        for name in ("resnet18-gn", "resnet50", "mobilenetv2-gn"):
            modules = [*models.build("x.py:load", name, 0).modules()]
            assert next(m for m in modules if isinstance(m, nn.Conv2d)).stride == (stride, stride)
            pools = sum(isinstance(m, nn.MaxPool2d) for m in modules)
            assert pools == (side == 64 and name != "mobilenetv2-gn")


def test_a_shortcut_has_no_parameters() -> None:
    """He et al.'s option A: every second pixel, and zeros for the new channels."""
    block = Block(4, 8).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 4, 6, 6)
    out = block(x)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, [0, 1, 6, 7]].any()


def test_an_lstm_reads_the_whole_sequence_in_order(shaped: Any) -> None:
    shaped((5,), np.uint8, classes=4)
    model = models.build("x.py:load", "auto", 0).eval()
    x = torch.tensor([[0, 1, 2, 3, 1], [0, 2, 1, 3, 1], [0, 1, 2, 1, 1]], dtype=torch.uint8)
    outputs = model(x)
    assert outputs.shape == (3, 4)
    assert len({tuple(row) for row in outputs.tolist()}) == 3


def test_given_word_vectors_stay_fixed_and_a_vocabulary_may_exceed_the_classes(shaped: Any) -> None:
    shaped((12,), np.int64, classes=12)
    plain = models.check("x.py:load", "sentiment-lstm", 0)
    assert plain[0].embedding.num_embeddings == 12
    assert plain[0].embedding.weight.requires_grad
    vectors = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    shaped((12,), np.int64, classes=2, vectors=vectors)
    model = models.check("x.py:load", "sentiment-lstm", 0)
    assert torch.equal(model[0].embedding.weight, torch.from_numpy(vectors))
    fixed = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert fixed == ["0.embedding.weight"]
    model[0].embedding.weight.data += 1  # the data's own stay
    again = models.build("x.py:load", "sentiment-lstm", 0)
    assert torch.equal(again[0].embedding.weight, torch.from_numpy(vectors))


def test_methods_train_a_model(tmp_path: Path) -> None:
    """With a head, features, Fisher information. MOON's z is the head's output, named or not."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef load():\n    rng = np.random.default_rng(0)\n"
        "    x, y = rng.integers(0, 3, (48, 5)), np.arange(48) % 3\n    return x, y, x, y\n"
    )
    by_name = "MOON(projection='projection')"
    result = simulate(
        methods=f"MOON, {by_name}, RFedAvgPlus(lam=0.1), FedCurv(lam=1.0)",
        dataset="mine.py:load",
        code_dir=str(tmp_path),
        model="char-lstm",
        projection=4,
        partition="iid",
        num_clients=2,
        rounds=2,
        local_steps=2,
        batch_size=8,
        seeds=[0],
    )
    losses = {run.label: [point["loss"] for point in run.test] for run in result.runs}
    assert losses["MOON"] == losses[by_name]
    assert len({tuple(values) for values in losses.values()}) == 3
    assert np.isfinite([*losses.values()]).all()
