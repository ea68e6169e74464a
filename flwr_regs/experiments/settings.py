"""The settings of a comparison: name, default, meaning and legal values, each said once.

The command line, ``[tool.flwr.app.config]`` and :func:`flwr_regs.simulate` take the same ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import tomllib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

from flwr_regs.experiments.calls import catalogue
from flwr_regs.experiments.data.catalogue import DATASETS, parsed
from flwr_regs.experiments.models.architectures import MODELS
from flwr_regs.wire.config import OPTIMIZERS, TRAIN_KEYS, check_train_config, nearest


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting; settings.toml says what each field is."""

    name: str
    default: Any
    meaning: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Collection[str] = ()
    own: str = ""
    needs: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    smoke: Any = None
    smoke_most: int = 0


_CHOICES = {"dataset": DATASETS, "model": MODELS, "optimizer": tuple(OPTIMIZERS)}
_FILE = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
SETTINGS = {
    name: Setting(name, **{"choices": _CHOICES.get(name, ()), **row})
    for name, row in tomllib.loads(_FILE).items()
}
"""Setting -> its declaration."""
DEFAULTS: dict[str, Any] = {name: setting.default for name, setting in SETTINGS.items()}
"""Setting -> its default."""
OF_PARTITIONS = {n: of.needs["partition"] for n, of in SETTINGS.items() if "partition" in of.needs}
"""Setting of partitions -> those that take it."""
PLACES = ("out", "code-dir", "data-dir")
"""Those that are folders of a machine."""
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
                raise ValueError(nearest_setting(name))
        return cls(**{field(name): _checked(SETTINGS[name], of) for name, of in given.items()})

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
        if self.num_classes == 1:
            raise ValueError("setting 'num-classes' must be 0, which is all, or at least 2, not 1")
        if ":" not in self.dataset:
            parsed(self.dataset)
        if self.projection and ":" in self.model:
            raise ValueError(f"setting 'projection' does not go with your own model '{self.model}'")
        if (self.held_out_clients or self.personalise) and self.test_on_clients:
            raise ValueError(
                "held-out-clients and personalise do not go with domains or private entries, nor "
                "with test-on-clients: there, the clients test the model"
            )
        if self.personalise and self.held_out_share not in (0, PERSONAL_SHARE):
            raise ValueError(
                f"personalise holds {PERSONAL_SHARE:.0%} of each client's examples out: leave "
                "held-out-share out"
            )
        if self.partition == "long-tail-rounds" and self.held_out_clients:
            raise ValueError(
                "held-out-clients does not go with partition=long-tail-rounds, where every client draws "
                "from all examples: use held-out-share"
            )
        code = self.code_dir if ":" in self.methods + self.dataset + self.model else ""
        for name, folder in (("data-dir", self.data_dir), ("code-dir", code)):
            if folder and not Path(folder).expanduser().is_dir():
                raise ValueError(f"setting '{name}': there is no folder '{folder}'")


def split_in_words(settings: Mapping[str, Any]) -> str:
    """Return a partition and the values of the settings that are its own, such as ``dirichlet(0.1)``."""
    partition = str(settings["partition"])
    own = [f"{settings[name]:g}" for name, kinds in OF_PARTITIONS.items() if partition in kinds]
    return partition + f"({', '.join(own)})" * bool(own)


def nearest_setting(name: str) -> str:
    """Say that there is no such setting; name the nearest, or how a method's parameter is given."""
    hint = nearest(name, [*DEFAULTS, *FIELD_KEYS])
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
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"v={text}")["v"]
    with suppress(ValueError):
        return float(text) if isinstance(default, float) else text  # .1, which is no TOML
    return text


def shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return json.dumps(value).strip('"')


def legal(of: Setting) -> str:
    """Say which values a setting can have."""
    text = _KINDS[type(of.default)]
    if of.choices:
        text = f"one of {', '.join(choice or repr(choice) for choice in of.choices)}"
        text += f", or your own such as {of.own}" if of.own else ""
    bounds = [(words, getattr(of, name)) for name, (_, words) in _BOUNDS.items()]
    return text + "".join(f" {words} {bound}" for words, bound in bounds if bound is not None)


def _checked(of: Setting, value: Any) -> Any:
    kind = type(of.default)
    legal_types = (int, float) if kind is float else (kind,)
    wrong = (
        isinstance(value, bool) != (kind is bool)
        or not isinstance(value, legal_types)
        or (isinstance(value, float) and not math.isfinite(value))
        or (isinstance(value, int) and not abs(value) < 2**63)  # what run-config can carry
        or (of.choices and not _is_chosen(str(value), of))
        or any(
            getattr(of, name) is not None and not holds(value, getattr(of, name))
            for name, (holds, _) in _BOUNDS.items()
        )
    )
    if wrong:
        if hint := nearest(str(value), of.choices) if of.choices else "":
            raise ValueError(f"setting '{of.name}' has no {value!r}{hint} It must be {legal(of)}")
        raise ValueError(f"setting '{of.name}' must be {legal(of)}, not {value!r}")
    return kind(value)


def _is_chosen(value: str, of: Setting) -> bool:
    """Return whether a value is one of the choices, one with arguments, or a reference to a user's own."""
    called = value.partition("(")[0] in of.choices and value.endswith(")")
    return value in of.choices or bool(of.own and (":" in value or called))


_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "above": (operator.gt, "above"),
    "low": (operator.ge, "of at least"),
    "below": (operator.lt, "below"),
    "high": (operator.le, "up to"),
}
"""Bound -> what holds for a value and the bound, and how that is said."""
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
"""Type of a default -> how its values are said."""


def field(name: str) -> str:
    """Return a setting's name as a field's."""
    return name.replace("-", "_")


def key(name: str) -> str:
    """Return a field's name as a setting's."""
    return name.replace("_", "-")
