"""All data sets of the package, as catalogue.toml lists them, and their names with arguments.

Nothing here loads numpy or a reader before data is read.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature
from typing import Any

from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.extras import table_beside


@dataclass(frozen=True)
class Source:
    """One data set; catalogue.toml says what each field is."""

    name: str
    meaning: str
    files: str
    reader: str
    shape: tuple[Any, ...]
    classes: Any
    tokens: Any = 0
    groups: str = ""
    hash: str = ""
    how: str = "try again, or put them there"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def read(self, data_dir: str, **arguments: Any) -> dict[str, Any]:
        """Return the fields of `flwr_regs.experiments.data.datasets.Data`, checked as a user's own are.

        Raises FileNotFoundError if the files are not there: which, where they are expected, and how to
        get them. Raises ValueError, with the folder, for files that are damaged or do not fit together.
        """
        from flwr_regs.experiments.data.own_data import checked
        from flwr_regs.experiments.data.sources.data_files import Missing, reading, root

        module, _, name = self.reader.partition(":")
        reader = getattr(importlib.import_module(f"{__package__}.sources.{module}"), name)
        place = "" if self.files.startswith("none") else f" in {root(data_dir)}"
        try:
            with reading(f"dataset '{self.name}'{place}"):
                return checked(reader(data_dir, **self.fixed, **arguments), self.classes)
        except Missing as error:
            detail = f" ({error})" if str(error) else ""
            what = f"dataset '{self.name}' needs {self.files.replace('`', '')}{detail}"
            where = f"data-dir, {root(data_dir)}" if data_dir else "data-dir, which is not set"
            hint = f"{self.how}, and set data-dir to their folder"
            raise FileNotFoundError(f"{what} in {where}; {hint}") from error


SOURCES = {name: Source(name, **row) for name, row in table_beside(__file__).items()}
"""Name -> data set. A name can have arguments, as in ``synthetic(alpha=0.5, beta=0.5)``."""
DATASETS = {name: source.meaning for name, source in SOURCES.items()}
"""Name -> its meaning in one line. Any other data set is a reference, such as ``mine.py:load``."""


def kind_of(dataset: str) -> Source:
    """Return one of the package's data sets with the shape, classes and tokens that its arguments make."""
    name, given = parsed(dataset)
    source = SOURCES[name]

    def number(of: Any) -> Any:
        if isinstance(of, list):
            return number(of[0]) + of[1]
        if of in source.choices:
            return source.choices[of][str(given[of])]
        return given[of] if isinstance(of, str) else of

    shape = tuple(map(number, source.shape))
    numbers = {"classes": number(source.classes), "tokens": number(source.tokens)}
    return replace(source, shape=shape, **numbers)


def parsed(dataset: str) -> tuple[str, dict[str, Any]]:
    """Return the name and all arguments of a data set's text, such as ``femnist(writers=100)``.

    Raises ValueError for an argument that does not exist, or for a value that is no literal or of another
    type than the default. The name is one of `SOURCES`, as the settings check.
    """
    name, bracket, rest = dataset.partition("(")
    source = SOURCES[name]
    given = dict(source.arguments)
    where = f"dataset '{dataset}'"
    if bracket and not given:
        raise ValueError(f"{where}: {name} takes no arguments, and no parentheses")
    try:
        ((call,),) = parse_methods(f"f{bracket}{rest}").values()
        takes = Signature([Parameter(key, Parameter.POSITIONAL_OR_KEYWORD) for key in given])
        values = takes.bind_partial(*call.args, **call.kwargs).arguments
    except (ValueError, TypeError) as error:
        arguments = ", ".join(f"{key}={default!r}" for key, default in given.items())
        expected = f"{name}(...) with literals for some of its arguments, {arguments}"
        raise ValueError(f"{where}: expected {expected}") from error
    given |= {k: _typed(v, given[k], f"{where}: {k}") for k, v in values.items()}
    for key, choices in source.choices.items():
        if str(given[key]) not in choices:
            known = ", ".join(map(repr, choices))
            raise ValueError(f"{where}: {key} must be one of {known}, not {given[key]!r}")
    return name, given


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


def expected(dataset: str, own: Mapping[str, str]) -> str:
    """Return the hash that a data set should have: a card's `own`, or the package's; empty: not known."""
    return own.get(dataset, SOURCES[dataset].hash if dataset in SOURCES else "")


def files(dataset: str) -> str:
    """Return in words which files a data set needs; empty: none, or it is a user's own."""
    source = SOURCES.get(dataset.partition("(")[0])
    return "" if source is None or source.files.startswith("none") else source.files


def present(dataset: str, data_dir: str = "") -> bool:
    """Return whether a data set's files seem to be in `data_dir`, by default in the cache.

    A user's own data set (``mine.py:load``) and what needs no files are always there.
    """
    from flwr_regs.experiments.data.sources.data_files import root

    patterns = re.findall(r"`([\w*/.-]*[*/.][\w*/.-]*)`", files(dataset))
    folder = root(data_dir)
    places = [folder, folder / dataset.partition("(")[0]]
    matches = (place.glob(p.rstrip("/")) for place in places for p in patterns)
    return not files(dataset) or any(next(each, None) for each in matches)
