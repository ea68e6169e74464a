"""The settings of a comparison: name, default, meaning and legal values, each said once.

The command line, ``[tool.flwr.app.config]`` and :func:`flwr_regs.simulate` take the same ones.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

from flwr_regs.experiments.calls import catalogue
from flwr_regs.experiments.data.catalogue import DATASETS, parsed
from flwr_regs.experiments.extras import table_beside
from flwr_regs.experiments.models.architectures import MODELS
from flwr_regs.wire.config import OPTIMIZERS, TRAIN_KEYS, check_train_config, nearest


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting; settings.toml says what each field is."""

    name: str
    default: Any
    meaning: str
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    choices: Collection[str] = ()
    own: str = ""
    needs: Mapping[str, Collection[str]] = field(default_factory=dict)
    smoke: Any = None
    smoke_most: int = 0


_CHOICES = {"dataset": DATASETS, "model": MODELS, "optimizer": tuple(OPTIMIZERS)}
_ROWS = table_beside(__file__)
SETTINGS = {n: Setting(n, **{"choices": _CHOICES.get(n, ()), **row}) for n, row in _ROWS.items()}
"""Setting -> its declaration."""
Values = Mapping[str, Any]
"""Setting -> value."""
DEFAULTS: dict[str, Any] = {name: setting.default for name, setting in SETTINGS.items()}
"""Setting -> its default."""
OF_PARTITIONS = {n: of.needs["partition"] for n, of in SETTINGS.items() if "partition" in of.needs}
"""Setting of partitions -> those that take it."""
PLACES = ("out", "code-dir", "data-dir")
"""Those that are folders of a machine."""
PROBLEM = (
    *("dataset", "partition", "num-clients", "num-classes", "synthetic", "examples"),
    *("examples-per-client", "test-examples", "test-on-clients", "test-split", "target-accuracy"),
    *("straggler-share", "straggler-speed", "drop-out", "dp-noise", "dp-delta"),
    *OF_PARTITIONS,
)
"""Settings that say what is learnt, and by whom. Methods that differ in them cannot be compared."""
PERSONAL_SHARE = 0.2
"""The share of each client's data that personalise holds out."""
FIELD_KEYS = {"num-server-rounds": "rounds", "learning-rate": "lr"}
"""The usual names of other Flower apps -> ours; with the value 0, ours counts."""


_FIELDS = [(n.replace("-", "_"), type(of.default), of.default) for n, of in SETTINGS.items()]


class Settings(make_dataclass("_Values", _FIELDS, frozen=True)):  # type: ignore[misc]
    """What a comparison can be told. Field ``a_b`` is the setting ``a-b``."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Return the settings that are `given` by name, checked one by one; the rest have their defaults.

        Two settings have a second name, see `FIELD_KEYS`. Raises ValueError for a setting that does not
        exist, or has a value of the wrong kind or range; the message names it, the value and what was
        expected.
        """
        given = dict(given)
        for theirs, ours in FIELD_KEYS.items():
            if value := given.pop(theirs, 0):
                if given.get(ours, DEFAULTS[ours]) not in (value, DEFAULTS[ours]):
                    raise ValueError(f"{theirs}={value} contradicts {ours}={given[ours]}: give one")
                given[ours] = value
        for name in given:
            if name not in DEFAULTS:
                hint = f"{_hint(name)} (`flwr-regs list settings` shows all)"
                raise ValueError(f"unknown setting '{name}'{hint}")
        return cls(**{field_name(name): checked(SETTINGS[name], of) for name, of in given.items()})

    @property
    def config(self) -> dict[str, Any]:
        """The settings by name, as a run config has them."""
        return {key(name): value for name, value in vars(self).items()}

    @property
    def changed(self) -> dict[str, Any]:
        """Those that differ from their defaults, by name."""
        return {name: value for name, value in self.config.items() if value != DEFAULTS[name]}

    @property
    def train_config(self) -> dict[str, Any]:
        """The ``train_config`` of every round."""
        config = self.config
        unused = {"optimizer": self.optimizer == "SGD", "local-epochs": self.local_steps}
        return {n: config[n] for n in TRAIN_KEYS if config[n] and not unused.get(n)}  # zero is off

    @property
    def evaluate_config(self) -> dict[str, Any]:
        """The ``evaluate_config`` of every round."""
        personal = {"personalise": self.personalise, "personal-lr": self.personal_lr}
        return personal if self.personalise else {}

    @property
    def model_arguments(self) -> tuple[str, str, int, str, str, int]:
        """The arguments of :func:`flwr_regs.experiments.models.models.build`."""
        return self.dataset, self.model, self.seed, self.data_dir, self.code_dir, self.projection

    def check(self) -> None:
        """Raise ValueError for settings that do not go together, or a folder that is not there."""
        check_train_config(self.train_config, "the run config")
        if self.num_classes == 1:
            raise ValueError("setting 'num-classes' must be 0, which is all, or at least 2, not 1")
        if ":" not in self.dataset:
            parsed(self.dataset)
        if self.projection and ":" in self.model:
            raise ValueError(f"setting 'projection' does not go with your own model '{self.model}'")
        if (self.held_out_clients or self.personalise) and self.test_on_clients:
            what = "held-out-clients and personalise do not go with domains or private entries, nor"
            raise ValueError(f"{what} with test-on-clients: there, the clients test the model")
        if self.personalise and self.held_out_share not in (0, PERSONAL_SHARE):
            what = f"personalise holds {PERSONAL_SHARE:.0%} of each client's examples out"
            raise ValueError(f"{what}: leave held-out-share out")
        if self.partition == "long-tail-rounds" and self.held_out_clients:
            raise ValueError("held-out-clients do not go with long-tail-rounds: use held-out-share")
        code = self.code_dir if ":" in self.methods + self.dataset + self.model else ""
        for name, folder in (("data-dir", self.data_dir), ("code-dir", code)):
            if folder and not Path(folder).expanduser().is_dir():
                moved = f"; if it was moved, {name}=FOLDER says where it is now"
                raise ValueError(f"setting '{name}': there is no folder '{folder}'{moved}")


def named(given: Values) -> dict[str, Any]:
    """Return settings as they stand beside others: by their first names, and with whole paths.

    Raises ValueError for two names of one setting, and as :meth:`Settings.of` does.
    """
    for theirs, ours in FIELD_KEYS.items():
        if theirs in given and ours in given:
            raise ValueError(f"'{theirs}' and '{ours}' are one setting: give one")
    renamed = {FIELD_KEYS.get(name, name): value for name, value in given.items()}
    Settings.of(renamed)
    paths = {name: renamed[name] for name in PLACES if renamed.get(name)}
    return renamed | {name: str(Path(of).expanduser().resolve()) for name, of in paths.items()}


def split_in_words(settings: Mapping[str, Any]) -> str:
    """Return a partition and the values of the settings that are its own, such as ``dirichlet(0.1)``."""
    partition = str(settings["partition"])
    own = [f"{settings[name]:g}" for name, kinds in OF_PARTITIONS.items() if partition in kinds]
    return partition + f"({', '.join(own)})" * bool(own)


def _hint(name: str) -> str:
    """Name the setting that is nearest to one that does not exist, or say how a parameter is given."""
    methods = {method.lower(): method for method in catalogue()}
    method, _, parameter = key(name).partition("-")
    if parameter and method.lower() in methods:
        call = f"{methods[method.lower()]}({field_name(parameter)}=...)"
        return f"; a method's parameters stand in its call, such as methods='{call}'"
    return nearest(name, [*DEFAULTS, *FIELD_KEYS])


def read(name: str, text: str) -> Any:
    """Return the value that the words ``name=text`` give; :meth:`Settings.of` checks it."""
    default = DEFAULTS.get(FIELD_KEYS.get(name, name))
    if isinstance(default, str):
        return text
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"v={text}")["v"]
    with suppress(ValueError):
        return float(text) if isinstance(default, float) else text  # .1, which is no TOML
    return text


def as_word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return json.dumps(value).strip('"')


def legal(of: Setting) -> str:
    """Say which values a setting can have."""
    text = _KINDS[type(of.default)]
    if of.choices:
        text = f"one of {', '.join(choice or repr(choice) for choice in of.choices)}"
        text += f", or your own such as {of.own}" if of.own else ""
    bounds = [(words, getattr(of, name)) for name, words in _BOUNDS.items()]
    return text + "".join(f" {words} {bound}" for words, bound in bounds if math.isfinite(bound))


def checked(of: Setting, value: Any) -> Any:
    """Return a value of the setting's type; ValueError that says what came, and what was expected."""
    kind = type(of.default)
    right = isinstance(value, (int, float) if kind in (int, float) else kind)
    right = right and isinstance(value, bool) == (kind is bool)
    if right and kind in (int, float):  # what run-config can carry, and neither NaN nor infinite
        right = type(value) is kind is float or abs(value) < 2**63
        right = right and of.low <= value <= of.high and of.above < value < of.below
        right = right and (kind is float or value == int(value))  # 1e3 is a whole number
    if not right or (of.choices and not _is_chosen(value, of)):
        if hint := nearest(str(value), of.choices) if of.choices else "":
            raise ValueError(f"setting '{of.name}' has no {value!r}{hint} It must be {legal(of)}")
        raise ValueError(f"setting '{of.name}' must be {legal(of)}, not {value!r}")
    return kind(value)


def _is_chosen(value: str, of: Setting) -> bool:
    """Return whether a value is one of the choices, a data set with arguments, or a user's own.

    A partition of a user's own is Flower Datasets'; there are no others.
    """
    called = of.name == "dataset" and value.partition("(")[0] in of.choices and value.endswith(")")
    own = value.startswith("fds:") if of.name == "partition" else bool(of.own) and ":" in value
    return value in of.choices or called or own


_BOUNDS = {"above": "above", "low": "of at least", "below": "below", "high": "up to"}
"""Bound -> how it is said."""
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
"""Type of a default -> how its values are said."""


def field_name(name: str) -> str:
    """Return a setting's name as a field's."""
    return name.replace("-", "_")


def key(name: str) -> str:
    """Return a field's name as a setting's."""
    return name.replace("_", "-")
