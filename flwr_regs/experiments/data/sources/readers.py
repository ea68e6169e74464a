"""All data sets of the package: what each is, which files it needs, its arguments, and its reader."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr_regs.experiments.data.sources.data_files import Parts
from flwr_regs.experiments.data.sources.pictures import AUGMENTATIONS, EMNIST_CLASSES
from flwr_regs.wire.config import nearest


@dataclass(frozen=True)
class Kind:
    """What a data set's examples are, known without its files.

    Attributes
    ----------
    shape : tuple of int
        Of one input.
    classes : int
        The number of classes; of a user's own pictures, the least that makes sense.
    tokens : int
        The number of different tokens of integer inputs; 0: the inputs are floats.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: int = 0


@dataclass(frozen=True)
class Source:
    """One data set.

    Attributes
    ----------
    meaning : str
        One line.
    files : str
        What has to be in the data-dir, or that nothing has.
    groups : str
        What a group is; empty: examples have none.
    reader : str
        ``module:function`` in this folder: from a data-dir and the arguments to the arrays.
    kind : callable
        From the arguments, all of them by name, to the `Kind`.
    choices : mapping
        Argument -> its legal values, where not all of its type are.
    """

    meaning: str
    files: str
    groups: str
    reader: str
    kind: Callable[[Mapping[str, Any]], Kind]
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def read(self) -> Callable[..., Parts]:
        """The reader."""
        module, _, name = self.reader.partition(":")
        home = importlib.import_module(f"{__package__}.{module}")
        return getattr(home, name)  # type: ignore[no-any-return]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments and their defaults."""
        parameters = inspect.signature(self.read).parameters
        return {name: p.default for name, p in parameters.items() if name != "data_dir"}


def _images(channels: int, size: int, classes: int) -> Callable[[Mapping[str, Any]], Kind]:
    return lambda given: Kind((channels, size, size), classes)


def _cifar(classes: int) -> Callable[[Mapping[str, Any]], Kind]:
    def kind(given: Mapping[str, Any]) -> Kind:
        size = 24 if given["augment"] == "crop-24" else 32
        return Kind((3, size, size), classes)

    return kind


def _sized(classes: int) -> Callable[[Mapping[str, Any]], Kind]:
    return lambda given: Kind((3, given["size"], given["size"]), classes)


_HUB = "downloaded with hub=True (flwr-datasets)"
_IDX = "or downloaded by torchvision"

SOURCES = {
    "digits": Source(
        "scikit-learn's 1,797 handwritten digits, 8 x 8 grey, 10 classes",
        "none: it comes with scikit-learn",
        "",
        "pictures:digits",
        _images(1, 8, 10),
    ),
    "mnist": Source(
        "70,000 handwritten digits, 28 x 28 grey, 10 classes",
        f"`MNIST/raw/*-ubyte`, {_IDX}",
        "",
        "pictures:mnist",
        _images(1, 28, 10),
    ),
    "fashion-mnist": Source(
        "70,000 pieces of clothing, 28 x 28 grey, 10 classes",
        f"`FashionMNIST/raw/*-ubyte`, {_IDX}",
        "",
        "pictures:fashion_mnist",
        _images(1, 28, 10),
    ),
    "emnist": Source(
        "handwritten letters and digits, 28 x 28 grey; 47 classes, or those of another split",
        f"`EMNIST/raw/emnist-*-ubyte`, {_IDX}",
        "",
        "pictures:emnist",
        lambda given: Kind((1, 28, 28), EMNIST_CLASSES[given["split"]]),
        {"split": tuple(EMNIST_CLASSES)},
    ),
    "femnist": Source(
        "handwritten letters and digits by writer, 28 x 28 grey, 62 classes",
        "TFF's `fed_emnist_train.h5` and `fed_emnist_test.h5`; LEAF's `train/*.json` and "
        f"`test/*.json`; or `*.parquet` of flwrlabs/femnist, {_HUB}",
        "writer",
        "handwriting:femnist",
        _images(1, 28, 62),
    ),
    "cifar10": Source(
        "60,000 photographs, 32 x 32 in colour, 10 classes",
        "`train*.parquet` and `test*.parquet` of uoft-cs/cifar10, "
        f"{_HUB}; or torchvision's `cifar-10-batches-py/`, {_IDX}",
        "",
        "pictures:cifar10",
        _cifar(10),
        {"augment": AUGMENTATIONS},
    ),
    "cifar100": Source(
        "60,000 photographs, 32 x 32 in colour, 100 classes in 20 superclasses",
        "`train*.parquet` and `test*.parquet` of uoft-cs/cifar100, "
        f"{_HUB}; or torchvision's `cifar-100-python/`, {_IDX}",
        "",
        "pictures:cifar100",
        _cifar(100),
        {"augment": AUGMENTATIONS},
    ),
    "shakespeare": Source(
        "the next character of a play, after 80 others, by speaker; 81 classes",
        "`input.txt`, a text with lines `NAME:`; or LEAF's `train/*.json` and `test/*.json`",
        "speaker",
        "texts:shakespeare",
        lambda given: Kind((80,), 81, 81),
    ),
    "sentiment140": Source(
        "tweets of 25 words by account, happy or sad",
        "`training*.csv` of Go et al. 2009; LEAF's `train/*.json` and `test/*.json`; or "
        f"`train*.parquet` of stanfordnlp/sentiment140, {_HUB}",
        "account",
        "texts:sentiment140",
        lambda given: Kind((25,), 2, given["words"] + 2),
    ),
    "synthetic": Source(
        "FedProx's Synthetic(alpha, beta): a linear model of its own for each client, 10 classes",
        "none: it is drawn from its seed",
        "client",
        "synthetic:synthetic",
        lambda given: Kind((60,), 10),
    ),
    "quadratics": Source(
        "the Field Guide's quadratic problems, one for each client; the loss counts, not the accuracy",
        "none: it is drawn from its seed",
        "client",
        "synthetic:quadratics",
        lambda given: Kind((given["dimension"] + 1,), 1),
    ),
    "digits-domains": Source(
        "digits in five domains: client k has k mod 5, and tests on its own",
        "none: it comes with scikit-learn",
        "",
        "pictures:digits",
        _images(1, 8, 10),
    ),
    "mnist-domains": Source(
        "mnist in five domains: unchanged, inverted, over photographs, rotated, blurred",
        f"`MNIST/raw/*-ubyte`, {_IDX}",
        "",
        "pictures:mnist_grey",
        _images(1, 28, 10),
    ),
    "digits-five": Source(
        "MNIST, SVHN, USPS, SynthDigits and MNIST-M, 28 x 28 in colour, 10 classes",
        "FedBN's `DOMAIN/partitions/train_part*.pkl` and `DOMAIN/test.pkl`",
        "domain",
        "digit_domains:digits_five",
        _images(3, 28, 10),
    ),
    "office-caltech": Source(
        "pictures of 10 kinds of things from four places, 256 x 256 in colour",
        "FedBN's `office_caltech_10/`: `DOMAIN_train.pkl`, `DOMAIN_test.pkl` and the pictures",
        "domain",
        "digit_domains:office_caltech",
        _sized(10),
    ),
    "domainnet": Source(
        "10 classes of DomainNet's clip art, infographics, paintings, drawings, photographs, sketches",
        "FedBN's `DomainNet/`: `DOMAIN_train.pkl`, `DOMAIN_test.pkl` and the pictures",
        "domain",
        "digit_domains:domainnet",
        _sized(10),
    ),
    "gld-23k": Source(
        "photographs of 203 landmarks by 233 photographers, 224 x 224 in colour",
        "TFF's `mini_gld_train_split.csv` and `mini_gld_test.csv`; the pictures as `images/ID.jpg`",
        "photographer",
        "landmarks:gld_23k",
        _sized(203),
    ),
    "gld-160k": Source(
        "photographs of 2,028 landmarks by 1,262 photographers, 224 x 224 in colour",
        "TFF's `federated_train.csv` and `test.csv`; the pictures as `images/ID.jpg`",
        "photographer",
        "landmarks:gld_160k",
        _sized(2028),
    ),
    "stackoverflow": Source(
        "the next of 10,000 words of a question or answer, by user",
        "TFF's `stackoverflow_train.h5`, `stackoverflow_test.h5` and `stackoverflow.word_count`",
        "user",
        "stackoverflow:stackoverflow",
        lambda given: Kind((given["length"],), given["words"] + 4, given["words"] + 4),
    ),
    "image-folder": Source(
        "your own pictures, 64 x 64; a folder is a class",
        "`train/CLASS/*` and `test/CLASS/*`; with groups=True `train/GROUP/CLASS/*`",
        "the folder above, with groups=True",
        "pictures:image_folder",
        lambda given: Kind((1 if given["grey"] else 3, given["size"], given["size"]), 2),
    ),
}
"""Name -> data set. A name can have arguments, as in ``synthetic(alpha=0.5, beta=0.5)``."""


def parsed(dataset: str) -> tuple[Source, dict[str, Any]]:
    """Return a data set by its text, such as ``femnist(writers=100)``, and all its arguments.

    Raises ValueError for a name or an argument that does not exist, or for a value that is no literal or of
    another type than the default.
    """
    name, bracket, _ = dataset.partition("(")
    name = name.strip()
    if name not in SOURCES:
        raise ValueError(
            f"there is no data set '{name}'{nearest(name, SOURCES)}; there are {', '.join(SOURCES)}"
        )
    source = SOURCES[name]
    given = source.arguments
    if bracket and not given:
        raise ValueError(f"dataset '{dataset}': {name} takes no arguments, and no parentheses")
    if bracket:
        legal = ", ".join(f"{k}={v!r}" for k, v in given.items())
        try:
            call = ast.parse(f"f{dataset[dataset.index('(') :]}", mode="eval").body
            assert isinstance(call, ast.Call)
            assert isinstance(call.func, ast.Name)
            by_place = [ast.literal_eval(a) for a in call.args]
            by_name = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            bound = inspect.signature(source.read).bind("", *by_place, **by_name).arguments
        except (SyntaxError, ValueError, TypeError, AssertionError) as error:
            raise ValueError(
                f"dataset '{dataset}': expected {name}(...) with literals for some of its arguments, "
                f"{legal}"
            ) from error
        for key, value in list(bound.items())[1:]:
            given[key] = _typed(value, given[key], f"dataset '{dataset}': {key}")
    for key, choices in source.choices.items():
        if given[key] not in choices:
            raise ValueError(
                f"dataset '{dataset}': {key} must be one of {', '.join(map(repr, choices))}, not "
                f"{given[key]!r}"
            )
    return source, given


def _typed(value: Any, default: Any, what: str) -> Any:
    """Return a value as the default's type; ValueError if it is none."""
    kind = type(default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{what} must be like its default {default!r}, not {value!r}")
    if kind is int and value < 0:
        raise ValueError(f"{what} must be at least 0, not {value}")
    return value
