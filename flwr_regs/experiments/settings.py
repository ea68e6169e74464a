"""The settings of a comparison: name, default, meaning and legal values, each said once.

The command line, ``[tool.flwr.app.config]`` and :func:`flwr_regs.simulate` take the same ones.
"""

from __future__ import annotations

import json
import math
import operator
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from flwr_regs.experiments.calls import catalogue
from flwr_regs.experiments.data.catalogue import DATASETS
from flwr_regs.experiments.models.architectures import MODELS
from flwr_regs.experiments.partition.partitions import PARTITIONS
from flwr_regs.wire.config import OPTIMIZERS, check_train_config, nearest


def setting(
    default: Any,
    meaning: str,
    low: float | None = None,
    high: float | None = None,
    choices: Collection[str] | None = None,
    above: float | None = None,
    below: float | None = None,
    own: str = "",
    needs: str = "",
) -> Any:
    """Declare a setting: its default, its meaning, its legal values, and what it is a part of.

    The values are `choices`, or `low` ≤ or `above` < value ≤ `high` or < `below`. Beside its choices, the
    value may be a reference to the user's own, such as `own`. The setting does nothing unless another one
    has the value that `needs` says: ``partition=shards,shards-mcmahan``; ``dp-clip-norm``: any but its
    default.
    """
    rule = {"low": low, "high": high, "choices": choices, "above": above, "below": below}
    return field(default=default, metadata={"meaning": meaning, "own": own, "needs": needs, **rule})


@dataclass(frozen=True)
class Settings:
    """What a comparison can be told. Field ``a_b`` is the setting ``a-b``."""

    methods: str = setting(
        "FedAvg,FedFOR",
        'the methods, as Python calls: "FedAvg, FedFOR(alpha=0.5), FedBN+FedFOR, mine.py:Clip(x=1)"',
    )
    code_dir: str = setting(
        "", "the folder where mine.py:name and module:name are looked up; default: the current one"
    )
    dataset: str = setting(
        "digits",
        "a data set of `flwr-regs list datasets`, such as synthetic(1,1), or your own: mine.py:load",
        choices=DATASETS,
        own="mine.py:load",
    )
    data_dir: str = setting("", "the folder that holds, or receives, the data set's files")
    model: str = setting(
        "auto",
        "a model of `flwr-regs list models`, or your own: mine.py:Net; auto: the data set's",
        choices=MODELS,
        own="mine.py:Net",
    )
    projection: int = setting(
        0,
        "if not 0, MOON's projection head before the output layer, with this many outputs",
        low=0,
    )
    partition: str = setting(
        "shards",
        "how the data is split over the clients: `flwr-regs list partitions`",
        choices=PARTITIONS,
    )
    shards_per_client: int = setting(
        2,
        "both shards partitions: the shards that a client gets",
        low=1,
        needs="partition=shards,shards-mcmahan",
    )
    classes_per_client: int = setting(
        2, "partition classes: the classes that each client gets", low=1, needs="partition=classes"
    )
    dirichlet_alpha: float = setting(
        0.1,
        "both Dirichlet partitions: smaller is less IID; the two alphas do not compare",
        above=0,
        needs="partition=dirichlet,dirichlet-hsu,dirichlet-niid-bench",
    )
    similarity: float = setting(
        0.0,
        "partition similarity: per cent of the data that is IID; the rest is label-sorted",
        low=0,
        high=100,
        needs="partition=similarity",
    )
    quantity_alpha: float = setting(
        0.5,
        "partition quantity: smaller makes the clients' sizes less equal",
        above=0,
        needs="partition=quantity",
    )
    noise_level: float = setting(
        0.1,
        "partition noise: client k of N, from 1, gets noise of variance noise-level * k / N on its inputs",
        low=0,
        needs="partition=noise",
    )
    pachinko_alpha: float = setting(
        0.1,
        "partition pachinko: of the coarse labels; smaller is less IID",
        above=0,
        needs="partition=pachinko",
    )
    pachinko_beta: float = setting(
        10.0,
        "partition pachinko: of the fine labels of each coarse one",
        above=0,
        needs="partition=pachinko",
    )
    interpolation: float = setting(
        0.5,
        "partition interpolated: the share that is shuffled across clients",
        low=0,
        high=1,
        needs="partition=interpolated",
    )
    sample_share: float = setting(
        0.1,
        "partition long-tail-rounds: the share of the data that a client samples in a round",
        above=0,
        high=1,
        needs="partition=long-tail-rounds",
    )
    long_tail: float = setting(
        100.0,
        "partition long-tail-rounds: how many times the most frequent class outnumbers the rarest",
        low=1,
        needs="partition=long-tail-rounds",
    )
    swap_probability: float = setting(
        0.05,
        "partition label-swaps-rounds: the chance that two labels swap in a round",
        low=0,
        high=1,
        needs="partition=label-swaps-rounds",
    )
    num_clients: int = setting(10, "clients that train", low=2)
    examples_per_client: int = setting(
        0, "if not 0, each client keeps only this many of its examples", low=0
    )
    test_examples: int = setting(
        0, "domains: if not 0, each client tests on at most this many images", low=0
    )
    examples: int = setting(
        0, "if not 0, only so many training examples in all, and a fifth as many for testing", low=0
    )
    num_classes: int = setting(0, "if not 0, only the examples of the first so many classes", low=0)
    synthetic: bool = setting(
        False, "random records of the data set's shape in place of its data, to try a command"
    )
    held_out_clients: int = setting(
        0, "clients that never train; if not 0, accuracy is measured on their data", low=0
    )
    held_out_share: float = setting(
        0.0,
        "share of each client's data held out; if not 0, accuracy is measured on it",
        low=0,
        below=1,
    )
    test_on_clients: bool = setting(
        False,
        "each client tests the model on test data of its own classes; always so if one of the methods "
        "compared keeps entries private",
    )
    test_split: str = setting(
        "classes",
        "where clients test: classes, on all test data of their own classes; matched, on a share of the "
        "test data that is distributed as their training data",
        choices=("classes", "matched"),
        needs="test-on-clients",
    )
    rounds: int = setting(30, "rounds of training", low=1)
    checkpoint_every: float = setting(
        60.0,
        "seconds between checkpoints, from which --resume goes on within a run; 0: none; not in Ray",
        low=0,
    )
    fraction_train: float = setting(
        1.0, "share of the clients in a round's cohort", above=0, high=1
    )
    cohorts: str = setting(
        "uniform",
        "how cohorts are drawn; class-covering: its clients together hold every class",
        choices=("uniform", "class-covering"),
    )
    overlap: bool = setting(
        False, "with a delta downlink: send the next cohort its model ahead of its round"
    )
    wire_dtype: str = setting(
        "",
        "bfloat16 or float16: float32 arrays travel rounded to this type",
        choices=("", "bfloat16", "float16"),
    )
    ensemble: int = setting(
        0,
        "if not 0, also test the mean prediction of the last so many global models",
        low=0,
        needs="test-on-clients=false",
    )
    personalise: str = setting(
        "",
        "each client also reports the accuracy of a classifier personalised this way",
        choices=("", "plain", "proximal", "distil", "both"),
    )
    personal_lr: float = setting(
        0.05, "the learning rate of personalise", above=0, needs="personalise"
    )
    lr: float = setting(0.05, "the clients' learning rate", above=0)
    optimizer: str = setting(
        "SGD", "the clients' optimiser: a class of torch.optim", choices=tuple(OPTIMIZERS)
    )
    momentum: float = setting(0.0, "of the clients' SGD or RMSprop", low=0, below=1)
    weight_decay: float = setting(0.0, "on the clients", low=0)
    clip_norm: float = setting(
        0.0, "if not 0, the largest norm of a client's gradient in a step", low=0
    )
    lr_decay: float = setting(
        1.0, "the learning rate of round t is lr * lr-decay ** (t - 1)", above=0, high=1
    )
    local_epochs: int = setting(
        5, "passes of a client over its data in a round", low=1, needs="local-steps=0"
    )
    local_steps: int = setting(
        0, "if not 0, steps of a client in a round, instead of epochs", low=0
    )
    batch_size: int = setting(32, "examples in a client's step", low=1)
    weighting: str = setting(
        "paper",
        "the weights of the clients; paper: as in the method's paper",
        choices=("paper", "num-examples", "uniform"),
    )
    seed: int = setting(7, "draws partition, initial model, cohorts and shuffling", low=0)
    target_accuracy: float = setting(
        0.85, 'the accuracy of the column "rounds to"', above=0, high=1
    )
    server_lr_decay: float = setting(
        1.0, "as lr-decay, for every server optimiser", above=0, high=1
    )
    incomplete: str = setting(
        "paper",
        "what is done with clients that took only some of their steps",
        choices=("paper", "average", "scale", "drop"),
    )
    drop_inactive: float = setting(
        0.0,
        "if not 0: drop a client inactive in more than this / (rounds * steps) of its turns",
        low=0,
    )
    restart_lr: bool = setting(False, "restart lr-decay when clients arrive, depart or are dropped")
    on_divergence: str = setting(
        "warn",
        "stop: end a run when its steps or its training loss blow up",
        choices=("warn", "stop"),
    )
    straggler_share: float = setting(0.0, "share of the clients that are slow", low=0, high=1)
    straggler_speed: float = setting(
        0.0,
        "each slow client takes its own fraction of its steps, from this up to 1",
        low=0,
        high=1,
        needs="straggler-share",
    )
    drop_out: float = setting(
        0.0, "the chance that a client takes no step in a round", low=0, below=1
    )
    dp_clip_norm: float = setting(
        0.0,
        "if not 0: central differential privacy, each client's update clipped to this norm",
        low=0,
    )
    dp_noise: float = setting(
        1.0, "the noise multiplier; needs weighting=uniform", low=0, needs="dp-clip-norm"
    )
    dp_delta: float = setting(
        1e-05, "the delta at which epsilon is reported", above=0, below=1, needs="dp-clip-norm"
    )
    out: str = setting("", "the results' folder; default: results/<time> in the current one")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Return the settings that are `given` by name, checked one by one; the rest have their defaults.

        Raises ValueError for a setting that does not exist or has a value of the wrong kind or range; the
        message names it, the value and what was expected.
        """
        for name in given:
            if name not in DEFAULTS:
                raise ValueError(nearest_setting(name))
        values = {**DEFAULTS, **given}
        return cls(**{f.name: _checked(name, values[name], f) for name, f in FIELDS.items()})

    @property
    def config(self) -> dict[str, Any]:
        """The settings by name, as a run config has them."""
        return {name: getattr(self, f.name) for name, f in FIELDS.items()}

    @property
    def changed(self) -> dict[str, Any]:
        """Those that differ from their defaults, by name."""
        return {name: value for name, value in self.config.items() if value != DEFAULTS[name]}

    def meets(self, needs: str) -> bool:
        """Return whether a setting's `needs` are met: see :func:`setting`."""
        owner, equals, values = needs.partition("=")
        value = self.config[owner]
        if not equals:
            return bool(value != DEFAULTS[owner])
        return json.dumps(value).strip('"') in values.split(",")

    @property
    def train_config(self) -> dict[str, Any]:
        """The ``train_config`` of every round."""
        given = {
            "lr": self.lr,
            "local-steps": self.local_steps,
            "local-epochs": 0 if self.local_steps else self.local_epochs,
            "optimizer": "" if self.optimizer == "SGD" else self.optimizer,
            "momentum": self.momentum,
            "weight-decay": self.weight_decay,
            "clip-norm": self.clip_norm,
        }
        return {name: value for name, value in given.items() if value}  # zero is off

    @property
    def evaluate_config(self) -> dict[str, Any]:
        """The ``evaluate_config`` of every round."""
        if not self.personalise:
            return {}
        return {"personalise": self.personalise, "personal-lr": self.personal_lr}

    @property
    def model_arguments(self) -> tuple[str, str, int, str, str, int]:
        """The arguments of :func:`flwr_regs.experiments.models.models.build`."""
        source = self.dataset, self.model, self.seed, self.data_dir, self.code_dir
        return (*source, self.projection)

    def check(self) -> None:
        """Raise ValueError for settings that do not go together, or a folder that is not there."""
        check_train_config(self.train_config, "the run config")
        if (self.held_out_clients or self.personalise) and self.test_on_clients:
            raise ValueError(
                "held-out-clients and personalise do not go with domains or private entries, nor "
                "with test-on-clients: there, the clients test the model"
            )
        if self.partition == "long-tail-rounds" and self.held_out_clients:
            raise ValueError(
                "held-out-clients does not go with partition=long-tail-rounds, where every client draws "
                "from all examples: use held-out-share"
            )
        if self.data_dir and not Path(self.data_dir).expanduser().is_dir():
            raise ValueError(f"setting 'data-dir': there is no folder '{self.data_dir}'")


def key(name: str) -> str:
    """Return a field's name as a setting's."""
    return name.replace("_", "-")


FIELDS = {key(f.name): f for f in fields(Settings)}
"""Setting -> its declaration."""
DEFAULTS: dict[str, Any] = {name: f.default for name, f in FIELDS.items()}
"""Setting -> its default."""


def nearest_setting(name: str) -> str:
    """Say that there is no such setting; name the nearest, or how a method's parameter is given."""
    hint = nearest(name, DEFAULTS)
    by_name = {method.lower(): method for method in catalogue()}
    method, _, parameter = key(name).partition("-")
    if not hint and parameter and method.lower() in by_name:
        call = f"{by_name[method.lower()]}({parameter.replace('-', '_')}=...)"
        hint = f"; a method's parameters stand in its call, such as methods='{call}'"
    return f"unknown setting '{name}'{hint} (`flwr-regs list settings` shows all)"


def read(name: str, text: str) -> Any:
    """Return the value that the words ``name=text`` give; :meth:`Settings.of` checks it."""
    default = DEFAULTS.get(name)
    if isinstance(default, str):
        return text
    try:
        return tomllib.loads(f"v={text}")["v"]
    except tomllib.TOMLDecodeError:
        with suppress(ValueError):
            return float(text) if isinstance(default, float) else text  # .1, which is no TOML
        return text


def dead(runs: Sequence[Settings], but: str = "") -> str:
    """Say which setting does nothing in any of the runs that have it; "" if there is none.

    Settings that need the setting `but` are left out.
    """
    for name, f in FIELDS.items():
        needs = f.metadata["needs"]
        owner, equals, values = needs.partition("=")
        having = [run for run in runs if needs and getattr(run, f.name) != f.default]
        if having and owner != but and not any(run.meets(needs) for run in having):
            value = json.dumps(having[0].config[owner]).strip('"')
            wanted = f"{owner}={values.replace(',', ' or ')}" if equals else f"a value for {owner}"
            return f"setting '{name}' does nothing with {owner}={value}: leave it out, or give {wanted}"
    return ""


def legal(f: Field[Any]) -> str:
    """Say which values a setting can have."""
    rule = f.metadata
    text = _WORDS[str(f.type)][1]
    if rule["choices"]:
        text = f"one of {', '.join(rule['choices'])}"
        text += f", or your own such as {rule['own']}" if rule["own"] else ""
    bounds = [(words, rule[name]) for name, (_, words) in _BOUNDS.items()]
    return text + "".join(f" {words} {bound}" for words, bound in bounds if bound is not None)


def meanings() -> dict[str, str]:
    """Return setting -> its default and meaning, for a terminal."""
    return {
        name: f.metadata["meaning"]
        + ("" if f.default == "" else f" [{json.dumps(f.default).strip(chr(34))}]")
        for name, f in FIELDS.items()
    }


def toml() -> str:
    """Return the settings as the lines of ``[tool.flwr.app.config]``, each with its meaning."""
    lines = [
        f"{f'{name} = {json.dumps(f.default)}':<27}  # {f.metadata['meaning']}"
        for name, f in FIELDS.items()
    ]
    return "\n".join(lines) + "\n"


def _checked(name: str, value: Any, f: Field[Any]) -> Any:
    kind, rule = _WORDS[str(f.type)][0], f.metadata
    legal_types: tuple[type, ...] = (int, float) if kind is float else (kind,)
    wrong = (
        isinstance(value, bool) != (kind is bool)
        or not isinstance(value, legal_types)
        or (isinstance(value, float) and not math.isfinite(value))
        or (isinstance(value, int) and not abs(value) < 2**63)  # what run-config can carry
        or (rule["choices"] and not _chosen(str(value), rule["choices"], rule["own"]))
        or any(
            rule[name] is not None and not holds(value, rule[name])
            for name, (holds, _) in _BOUNDS.items()
        )
    )
    if wrong:
        hint = nearest(str(value), rule["choices"]) if rule["choices"] else ""
        raise ValueError(f"setting '{name}' must be {legal(f)}, not {value!r}{hint}")
    return kind(value)


def _chosen(value: str, choices: Collection[str], own: str) -> bool:
    """Return whether a value is one of the choices, or where there may be a user's own, `own`:

    a reference, or a choice with arguments in parentheses.
    """
    called = value.partition("(")[0] in choices and value.endswith(")")
    return value in choices or bool(own and (":" in value or called))


_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "above": (operator.gt, "above"),
    "low": (operator.ge, "of at least"),
    "below": (operator.lt, "below"),
    "high": (operator.le, "up to"),
}
"""Bound -> what holds for a value and the bound, and how that is said."""
_WORDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text"),
    "bool": (bool, "true or false"),
}
"""Annotation -> the type, and how it is said."""
