"""The comparison's models: their layers, sizes and weights, for the data's shape and any other."""

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
from flwr_regs.experiments.models.layers import Block, model
from tests.conftest import drawn

CNN = 2 * "Conv2d ReLU MaxPool2d " + "Flatten Linear ReLU Linear"
CNN_BN = 2 * "Conv2d BatchNorm2d ReLU MaxPool2d " + "Flatten Linear BatchNorm1d ReLU Linear"


@pytest.mark.parametrize(
    ("dataset", "kind", "auto", "parameters", "layers"),
    [
        ("digits", "mlp", True, 4810, "Flatten Linear ReLU Linear"),
        ("mnist", "mlp", False, 199_210, "Flatten Linear ReLU Linear ReLU Linear"),
        ("digits", "cnn", False, 22_602, CNN),
        ("mnist", "cnn", True, 1_663_370, CNN),
        ("digits-domains", "cnn-bn", True, 22_778, CNN_BN),
        ("mnist-domains", "cnn-bn", True, 207_098, CNN_BN),
    ],
)
def test_the_packages_data_have_these_layers_and_weights_in_torchs_order(
    dataset: str, kind: str, auto: bool, parameters: int, layers: str
) -> None:
    before = torch.get_rng_state()
    made = models.check(dataset, kind, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert [type(layer).__name__ for layer in made] == layers.split()
    assert sum(p.numel() for p in made.parameters()) == parameters
    assert all(module.training for module in made.modules())
    again = models.build(dataset, "auto" if auto else kind, 3)
    with drawn(3):
        for layer in again:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    for one, other in zip(made.state_dict().items(), again.state_dict().items(), strict=True):
        assert (one[0], one[1].tolist()) == (other[0], other[1].tolist())


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
    for kind in ("mlp", "cnn", "cnn-bn") if len(shape) == 3 else ("mlp",):
        built = models.check("x.py:load", kind, 0)
        assert built(torch.zeros(2, *shape)).shape == (2, 3)
        assert (built.state_dict().keys() == names) == (kind == auto)
        if kind == "cnn":  # auto takes it where it is McMahan et al.'s
            assert (built[0].kernel_size == (5, 5)) == (auto == "cnn")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet20", 269_722),  # He et al. 2016, Tab. 6: 0.27 million
        ("vgg11", 865_482),  # Sattler et al. 2020, Tab. II
        ("resnet50", 25_557_032),  # torchvision's page of the model
        ("mobilenetv2-gn", 3_504_872),  # the same; GroupNorm has as many as BatchNorm
        ("alexnet", 57_044_810 + 2 * 9344),  # torchvision's for 10 classes, and BatchNorm
        ("char-lstm", 820_522 - 10 * 265 + 2048),  # Reddi et al. 2021, Tab. 9: one bias
    ],
)
def test_a_model_has_as_many_parameters_as_its_source_states(name: str, parameters: int) -> None:
    net = catalogue.NETS[name]
    with torch.device("meta"):
        made = model(net.make(net.classes if net.words else net.example), net.classes)
    assert sum(p.numel() for p in made.parameters()) == parameters


WITH_HEAD = ("lenet", "vgg9", "resnet8", "mobilenetv2-gn", "char-lstm")
WITHOUT = ("cnn-4-4", "vgg11", "resnet18-gn", "digits-convnet", "sentiment-lstm")
SHAPES = {"vgg11": (3, 32, 32), "mobilenetv2-gn": (3, 32, 32)}


@pytest.mark.parametrize(
    ("name", "projection"), [*((n, 6) for n in WITH_HEAD), *((n, 0) for n in WITHOUT)]
)
def test_a_step_moves_every_parameter(name: str, projection: int, shaped: Any) -> None:
    """On the data's shape, classes and vocabulary; a head is drawn after the body."""
    words = catalogue.NETS[name].words
    shape = (7,) if words else SHAPES.get(name, (1, 20, 16))
    shaped(shape, np.int64 if words else np.float32, classes=4)
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
        assert n.endswith("bias") or not torch.equal(p, before[n]), n
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


def test_an_lstm_reads_the_whole_sequence_and_keeps_given_vectors(shaped: Any) -> None:
    shaped((5,), np.uint8, classes=4)
    x = torch.tensor([[0, 1, 2, 3, 1], [0, 2, 1, 3, 1], [0, 1, 2, 1, 1]], dtype=torch.uint8)
    outputs = models.build("x.py:load", "auto", 0).eval()(x)
    assert len({tuple(row) for row in outputs.tolist()}) == 3
    vectors = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    shaped((12,), np.int64, classes=2, vectors=vectors)  # a vocabulary may exceed the classes
    for _ in range(2):
        model = models.check("x.py:load", "sentiment-lstm", 0)
        assert torch.equal(model[0].embedding.weight, torch.from_numpy(vectors))
        fixed = [n for n, p in model.named_parameters() if not p.requires_grad]
        assert fixed == ["0.embedding.weight"]
        model[0].embedding.weight.data += 1  # the data's own stay


def test_methods_train_a_model(tmp_path: Path) -> None:
    """With a head, features, Fisher information. MOON's z is the head's output, named or not."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef load():\n    rng = np.random.default_rng(0)\n"
        "    x, y = rng.integers(0, 3, (48, 5)), np.arange(48) % 3\n    return x, y, x, y\n"
    )
    by_name = "MOON(projection='projection')"
    given = {"dataset": "mine.py:load", "code_dir": str(tmp_path), "partition": "iid", "seeds": [0]}
    steps = {"num_clients": 2, "rounds": 2, "local_steps": 2, "batch_size": 8}
    methods = f"MOON, {by_name}, RFedAvgPlus(lam=0.1), FedCurv(lam=1.0)"
    result = simulate(methods=methods, model="char-lstm", projection=4, **given, **steps)
    losses = {run.label: [point["loss"] for point in run.test] for run in result.runs}
    assert losses["MOON"] == losses[by_name]
    assert len({tuple(values) for values in losses.values()}) == 3
    assert np.isfinite([*losses.values()]).all()
