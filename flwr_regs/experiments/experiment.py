"""What is compared, on what, under which settings: an `Experiment`, and the `Run`s that it is made of.

Both are values. Text becomes an `Experiment` at an edge: words.py (the command line), cards/card_files.py
(a card, a folder's experiment.toml), simulation.py, or run/server_app.py (Flower's run config).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

from flwr_regs.experiments import strategies, user_code
from flwr_regs.experiments.calls import Calls, parse_methods, text_of
from flwr_regs.experiments.data.datasets import two_examples
from flwr_regs.experiments.extras import missing_extra
from flwr_regs.experiments.models.architectures import chosen
from flwr_regs.experiments.partition.client_data import client_data_of, data_of
from flwr_regs.experiments.partition.partitions import BY_ROUND
from flwr_regs.experiments.settings import DEFAULTS, SETTINGS, Settings, Values, as_word, field_name
from flwr_regs.experiments.space import Point, Space, is_grid, points, shown
from flwr_regs.server.options import Options

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

    from flwr_regs import CentralDP, RegStrategy

OF_STRATEGIES = Options.names() & {*map(field_name, SETTINGS)} - {"checkpoint_every"}
"""The settings that a strategy takes by the same name; a run has checkpoints in a folder of its own."""
HALVED = 6
"""Of so many points or more, the worse ones do not train for all rounds."""
SERVER_LR = "a method with a server learning rate, such as FedAdam"
HELD_OUT = 0.2
"""The share of each client's data that tuning measures on, unless held-out-share says otherwise."""


@dataclass(frozen=True)
class Run:
    """One method with one seed.

    Attributes
    ----------
    label : str
        What names it among the runs of a panel, with its seed: its row, and the point of a trial.
    settings : Settings
        With its own seed; `methods` is its method alone.
    calls : tuple of Call
        The method, parsed.
    stated : frozenset of str
        The settings that somebody has given, also those that are the default then.
    row : str
        Its row in the tables.
    point : dict
        What tuning tries in it, or has chosen for it.
    """

    label: str
    settings: Settings
    calls: Calls = field(compare=False)
    stated: frozenset[str] = field(compare=False)
    row: str = field(compare=False)
    point: Point = field(compare=False)

    @property
    def method(self) -> str:
        """The method in one form of spaces and quotes."""
        return text_of(self.calls)

    @property
    def seed(self) -> int:
        """The seed of all that is drawn."""
        return int(self.settings.seed)

    @property
    def key(self) -> tuple[str, int]:
        """What names it among the runs of a panel."""
        return self.label, self.seed

    def meets(self, needs: Mapping[str, Collection[str]]) -> bool:
        """Return whether a setting's `needs` are met: see settings.toml."""

        def met(owner: str, values: Collection[str]) -> bool:
            if owner == "methods":
                takes = [strategies.of_call(c, self.settings.code_dir) for c in self.calls]
                return any({*values} <= {*one.parameters} for one in takes)
            value = self.settings.config[owner]
            return as_word(value) in values if values else value != DEFAULTS[owner]

        return any(met(*need) for need in needs.items())

    def strategy(self, only_check: bool = False) -> RegStrategy:
        """Return a new strategy of the method, with the settings; what the method's calls say wins.

        Raises as :func:`flwr_regs.experiments.strategies.build` does, also with `only_check`.
        """
        settings = self.settings
        common: dict[str, Any] = {name: getattr(settings, name) for name in OF_STRATEGIES}
        common |= {name: common[name] or None for name in ("wire_dtype", "drop_inactive")}
        common = {name: value for name, value in common.items() if value != "paper"}
        if settings.dp_clip_norm:
            common["privacy"] = _privacy(settings, only_check)
        return strategies.build(
            self.calls,
            settings.code_dir,
            only_check,
            min_train_nodes=1,
            min_available_nodes=1,
            min_evaluate_nodes=1,
            fraction_evaluate=float(bool(settings.personalise or settings.test_on_clients)),
            lr_schedule=lambda t: settings.lr_decay ** (t - 1),
            server_lr_schedule=lambda t: settings.server_lr_decay ** (t - 1),
            **common,
        )

    def check(self) -> None:
        """Raise ValueError if the method refuses its settings, the model or the optimiser."""
        settings = self.settings
        settings.check()
        in_turns = self.method == "Local" and settings.fraction_train < 1
        if in_turns and settings.partition in BY_ROUND:
            what = f"'Local' trains a client's model in its turns, and {settings.partition} changes data"
            hint = "leave Local out, or let all clients train in each round (fraction-train=1)"
            raise ValueError(f"{what} by rounds: {hint}")
        strategy = self.strategy()
        with strategies.named(self.method):
            strategy.check_model(initial_model(*settings.model_arguments))
            strategy.prepare(settings.rounds, None, settings.train_config, settings.evaluate_config)


@dataclass(frozen=True)
class Row:
    """A method to compare.

    Attributes
    ----------
    name : str
        Its name in a card, or the label of a sweep's row.
    calls : tuple of Call
    settings : dict
        Its own; they are not tuned for it.
    panels : tuple of str
        The panels that have it; empty: all.
    tune : tuple of Space
        What is tried for it alone, or in place of the experiment's space of the same key.
    """

    name: str
    calls: Calls
    settings: Values = field(default_factory=dict)
    panels: tuple[str, ...] = ()
    tune: tuple[Space, ...] = ()


@dataclass(frozen=True)
class Panel:
    """A column of a table or a curve's setting.

    Attributes
    ----------
    name : str
    settings, reduced : dict
        In place of the experiment's.
    reports : dict
        Metric -> row's name -> what the source reports: a number, or (mean, standard deviation); accuracies
        in per cent.
    notes : tuple of str
        What a reader must know of its data.
    methods : tuple of str
        The names of its rows; empty: all that do not name their panels.
    """

    name: str = "all"
    settings: Values = field(default_factory=dict)
    reduced: Values = field(default_factory=dict)
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    def has(self, row: Row) -> bool:
        """Return whether it has a row."""
        wanted = not self.methods or row.name in self.methods
        return wanted and (not row.panels or self.name in row.panels)


@dataclass(frozen=True)
class Experiment:
    """What is compared, on what, under which settings; see KEYS in cards/card_files.py.

    `settings` are those that all runs have, by name. With `baseline`, rows are compared with the first one;
    such a benchmark tunes each method on held-out data before it is tested.
    """

    settings: Values
    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    panels: tuple[Panel, ...] = (Panel(),)
    tune: tuple[Space, ...] = ()
    trials: int = 8
    tuning_seeds: tuple[int, ...] = (101,)
    heading: str = "method"
    baseline: bool = False
    smoke: bool = False
    name: str = ""
    title: str = ""
    source: str = ""
    where: str = ""
    setting: str = ""
    metrics: tuple[str, ...] = ()
    reduced: Values = field(default_factory=dict)
    departures: tuple[str, ...] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_methods(cls, settings: Values, seeds: Sequence[int] = (), **more: Any) -> Experiment:
        """Return the comparison of the methods in settings, by default with the seed in them."""
        whole = Settings.of(settings)
        rows = tuple(Row(text, calls) for text, calls in parse_methods(whole.methods).items())
        stated = (settings.keys() | whole.changed) - {"methods", "seed"}
        common = {name: value for name, value in whole.config.items() if name in stated}
        return cls(common, rows, tuple(seeds) or (whole.seed,), **more)

    @property
    def ordered(self) -> bool:
        """Whether the rows are the values of an ordered parameter."""
        is_number = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?").fullmatch
        return self.heading not in ("method", "case") and all(is_number(r.name) for r in self.rows)

    def rows_of(self, panel: Panel) -> dict[str, Row]:
        """Return label -> row of a panel, in order.

        A sweep's rows have their names. The label of a method is its text without what is tuned and without
        the file or module of a user's own code, unless two rows had the same then.
        """
        rows = [row for row in self.rows if panel.has(row)]
        if self.heading != "method":
            return {row.name: row for row in rows}

        def untuned_text(row: Row) -> str:
            tuned, parts = {space.key for space in self.spaces_of(row)}, []
            for call in row.calls:
                kept = {k: v for k, v in call.kwargs.items() if f"{call.target}.{k}" not in tuned}
                parts.append(replace(call, target=call.target.rpartition(":")[2], kwargs=kept))
            return text_of(parts)

        untuned = [*map(untuned_text, rows)]
        labelled: dict[str, Row] = {}
        for short, row in zip(untuned, rows, strict=True):
            label = short if untuned.count(short) == 1 else text_of(row.calls)
            if label in labelled and labelled[label].settings != row.settings:
                label = row.name
            if labelled.setdefault(label, row) is not row:
                raise ValueError(f"'{label}' appears here twice: name each method once")
        return labelled

    def spaces_of(self, row: Row) -> list[Space]:
        """Return what is tuned for a method."""
        spaces = {s.key: s for s in (*self.tune, *row.tune) if s.applies(row.calls)}
        return [space for key, space in spaces.items() if key not in row.settings]

    def points_of(self, row: Row, ends: bool = False) -> list[Point]:
        """Return the points that are tried for a method; or the first and the last value of each space."""
        spaces = self.spaces_of(row)
        at_ends: list[Point] = [{s.key: s.at(share) for s in spaces} for share in (0.0, 1 - 1e-9)]
        return at_ends if ends else points(spaces, self.trials)

    def rungs_of(self, panel: Panel, label: str, ends: bool = False) -> list[tuple[int, int]]:
        """Return (rounds, points that train so long) of a method's successive halving, in order.

        All of its points train for an eighth of the rounds, the best third for a quarter, the best sixth
        for half of them. A grid, the `ends`, or fewer than `HALVED` points, train for all rounds at once.
        """
        row, rounds = self.rows_of(panel)[label], self.run_of(panel, label, {}, 0).settings.rounds
        many = len(self.points_of(row, ends))
        if many < HALVED or is_grid(self.spaces_of(row), self.trials):
            return [(rounds, many)]
        return [(max(rounds // part, 1), ceil(many / of)) for part, of in ((8, 1), (4, 3), (2, 6))]

    @property
    def tunes(self) -> bool:
        """Whether something is tuned, of all methods or of one."""
        return bool(self.tune or any(row.tune for row in self.rows))

    @property
    def panel(self) -> Panel:
        """The panel of an experiment that has one."""
        (panel,) = self.panels
        return panel

    def tests(self, panel: Panel, chosen: Mapping[str, Point] = {}) -> list[Run]:
        """Return the runs of a panel, each method at the point that tuning has chosen for its label."""
        pairs = [(seed, label) for seed in self.seeds for label in self.rows_of(panel)]
        if self.baseline:  # else whole comparisons come first
            pairs = [(seed, label) for label in self.rows_of(panel) for seed in self.seeds]
        return [self.run_of(panel, label, chosen.get(label, {}), seed) for seed, label in pairs]

    def trial_runs(self, panel: Panel, ends: bool = False) -> list[Run]:
        """Return the runs that tuning needs: each method at each of its points, or at their `ends`.

        As long as it is not known which points are the best, the first ones stand for them.
        """
        return [
            self.run_of(panel, label, point, seed, rounds)
            for label, row in (self.rows_of(panel) if self.tunes else {}).items()
            for rounds, many in self.rungs_of(panel, label, ends)
            for point in self.points_of(row, ends)[:many]
            for seed in self.tuning_seeds
        ]

    def run_of(self, panel: Panel, label: str, point: Point, seed: int, trial: int = 0) -> Run:
        """Return the run of a row at a point of its space; a `trial` of some rounds holds data out."""
        row = self.rows_of(panel)[label]
        settings = {**self.settings, **panel.settings, **row.settings}
        if self.baseline:  # the test is on other data than tuning
            share = settings.pop("held-out-share", HELD_OUT)
            settings |= {"held-out-share": share} if trial else {}
        if panel.settings.get("test-on-clients"):  # for all: rows compare so
            settings["test-on-clients"] = True
        calls = row.calls
        for key, value in point.items():  # a setting is no argument of a call
            calls = strategies.with_argument(calls, key, value, settings.get("code-dir", ""))
        settings |= {key: value for key, value in point.items() if "." not in key}
        settings |= {"methods": text_of(calls), "seed": seed}
        whole, name = Settings.of(settings), label
        if trial:
            shorter = f"; {trial} rounds" * (trial < whole.rounds)
            whole, name = replace(whole, rounds=trial), f"{label} [{shown(point)}{shorter}]"
        return Run(name, whole, calls, frozenset(settings), label, point)

    @cached_property
    def ends(self) -> list[Run]:
        """The runs of all panels; of what is tuned, those at the ends of the spaces alone."""
        return [r for p in self.panels for r in [*self.trial_runs(p, ends=True), *self.tests(p)]]

    @property
    def data_hashes(self) -> dict[str, str]:
        """Data set -> the hash of what is here; nothing for a smoke test, or for random records."""
        runs = [run.settings for panel in self.panels for run in self.tests(panel)]
        read = [settings for settings in runs if not (self.smoke or settings.synthetic)]
        whole = {of.dataset: replace(of, examples=0, num_classes=0) for of in read}
        return {dataset: data_of(settings).hash for dataset, settings in whole.items()}

    def fair(self) -> Experiment:
        """Return the experiment in which the clients test every method of a panel if they must test one.

        They must if they are told to, have domains of their own, or the method keeps entries private.
        """
        return replace(self, panels=tuple(map(self._on_clients, self.panels)))

    def checked(self, data: bool = True) -> Experiment:
        """Return the experiment as :meth:`fair` says, after a check of its settings, methods and models.

        So are its `data`, and how they are split, if asked. What is quick to check comes first. Raises
        ValueError that says what is wrong; ImportError or OSError as
        :func:`flwr_regs.experiments.data.datasets.load` does.
        """
        if both := {*self.seeds} & {*(self.tuning_seeds if self.tunes else ())}:
            raise ValueError(f"seeds {sorted(both)} are both for tuning and for the test")
        if self.trials < 1:
            raise ValueError(f"--trials must be at least 1, not {self.trials}")
        if self.baseline and any(run.settings.held_out_clients for run in self.ends):
            raise ValueError("bench tests on the test set: leave held-out-clients out")
        trials = [run for panel in self.panels for run in self.trial_runs(panel, ends=True)]
        if self.baseline and not all(run.settings.held_out_share for run in trials):
            held = "bench tunes on data that clients hold out"
            raise ValueError(f"{held}: leave held-out-share=0 out")
        for space in self.tune:
            if not any(space.applies(row.calls) for row in self.rows):
                texts = ", ".join(text_of(row.calls) for row in self.rows)
                raise ValueError(f"--tune {space.key}: none of {texts} has this")
        if not self.smoke:
            refuse_dead(self.ends, but="test-on-clients")
        check_words(self.ends)
        first = replace(self, seeds=self.seeds[:1])
        for panel in self.panels:
            refuse_same(first.tests(panel))
        every = [client_data_of(run.settings) for run in self.ends if data]
        for clients in dict.fromkeys(every):  # raises for a partition that is impossible
            assert clients.parts
            clients.server_rows()
        whole = self.fair()
        if not self.smoke:
            refuse_dead(whole.ends)
        for run in {(run.label, run.method): run for run in whole.ends}.values():
            run.check()
        for run in whole.ends if data else ():
            clients, of = client_data_of(run.settings), run.settings
            asks = {
                "its clients test": of.test_on_clients or of.personalise,
                "ensemble counts classes": of.ensemble,
                "--tune ranks by accuracy": self.tunes,
            }
            asked = next((what for what, it in asks.items() if it), "")
            if asked and clients.data.loss:
                why = f"the loss of dataset '{of.dataset}' is its own, and has no accuracy"
                raise ValueError(f"{run.label}: {asked}, but {why}")
            if of.partition == "noise" and clients.data.augment == "crop-24":
                clash = f"{run.label}: partition=noise does not go with {of.dataset}"
                why = "crop-24 standardises each picture by itself, after the noise was added"
                raise ValueError(f"{clash}: {why}")
            if of.test_on_clients:
                clients.test_rows(0)
        return whole

    def _on_clients(self, panel: Panel) -> Panel:
        tests = replace(self, seeds=self.seeds[:1]).tests(panel)
        methods = {run.method: run.calls for run in tests}
        made = strategies.check_apart(methods, tests[0].settings.code_dir)
        given = [run.settings for run in tests]
        asked = any(of.test_on_clients or of.dataset.endswith("-domains") for of in given)
        if asked or any(map(strategies.is_private, made.values())):
            return replace(panel, settings={**panel.settings, "test-on-clients": True})
        return panel

    def only(self, *panels: Panel) -> Experiment:
        """Return the experiment with these panels alone, and the rows that they have."""
        names = {panel.name for panel in panels}
        rows = [row for row in self.rows if any(panel.has(row) for panel in panels)]
        tune = tuple(s for s in self.tune if any(s.applies(row.calls) for row in rows))
        kept = tuple(replace(r, panels=tuple(n for n in r.panels if n in names)) for r in rows)
        return replace(self, panels=panels, rows=kept, tune=tune)

    def given(self, settings: Values) -> Experiment:
        """Return the experiment with settings that win over all others; they are not tuned.

        What else it states, and these settings, methods and panels leave without effect, is gone.
        """
        whole = replace(self._without(settings), settings={**self.settings, **settings})
        idle = {name for name, _ in dead(whole.ends, but="test-on-clients")} - settings.keys()
        return whole._without(idle)

    def _without(self, names: Collection[str]) -> Experiment:
        """Return the experiment that neither states nor tunes some settings."""

        def rest(of: Experiment | Row | Panel) -> dict[str, Any]:
            return {key: value for key, value in of.settings.items() if key not in names}

        def spaces(of: Experiment | Row) -> tuple[Space, ...]:
            return tuple(space for space in of.tune if space.key not in names)

        panels = tuple(replace(one, settings=rest(one)) for one in self.panels)
        rows = tuple(replace(one, settings=rest(one), tune=spaces(one)) for one in self.rows)
        return replace(self, settings=rest(self), tune=spaces(self), rows=rows, panels=panels)


def check_words(runs: Sequence[Run]) -> None:
    """Raise ValueError for what is wrong by itself: settings, arguments, methods that do not compose.

    Neither torch nor the package's data are loaded; a user's own code is.
    """
    for run in {(run.method, replace(run.settings, seed=0)): run for run in runs}.values():
        settings = run.settings
        settings.check()
        for reference in (settings.dataset, settings.model):
            if ":" in reference:
                user_code.load(reference, settings.code_dir)
        if ":" not in settings.dataset + settings.model:
            examples, _ = two_examples(settings.dataset, settings.data_dir)
            chosen(settings.dataset, settings.model, examples)
        with suppress(NameError):  # only torch can tell
            run.strategy(only_check=True)


def refuse_same(runs: Sequence[Run]) -> None:
    """Raise ValueError if two runs train the same under two labels.

    Strategies of two classes do not if one of them, or its client, overrides more than a constructor.
    """

    def code(kind: type) -> set[tuple[str, int]]:
        names = {name for name in dir(kind) if name[:2] != "__"} - {"_abc_impl", "method", "terms"}
        return {(name, id(inspect.getattr_static(kind, name))) for name in names}

    def known(run: Run, only_check: bool) -> tuple[Any, ...]:
        made = strategies.build(run.calls, run.settings.code_dir, only_check)
        kinds: list[type] = [type(made)]
        if not only_check:
            from flwr_regs.flower.client import client_class  # loads torch

            kinds.append(client_class(made))
        settings = replace(run.settings, methods="")
        return made.method_name, [*map(code, kinds)], replace(made.options, seed=0), settings

    own = any(":" in run.method for run in runs)
    try:
        several = [known(run, only_check=not own) for run in runs]
    except NameError:  # only torch can tell
        several = [known(run, only_check=False) for run in runs]
    for run, one in zip(runs, several, strict=True):
        if (other := runs[several.index(one)]) is not run:
            raise ValueError(f"'{other.label}' and '{run.label}' are the same: leave one out")


def refuse_dead(runs: Sequence[Run], but: str = "") -> None:
    """Raise ValueError for a setting that is :func:`dead`."""
    for name, run in dead(runs, but):
        needs = SETTINGS[name].needs
        words = [(owner, as_word(run.settings.config[owner])) for owner in needs]
        given = [f"with {owner}={word}" if word else f"without {owner}" for owner, word in words]
        values = " and ".join(given).replace(" and with ", " and ")
        each = [f"{owner}={' or '.join(of)}" if of else owner for owner, of in needs.items()]
        needed = " or ".join(each).replace("methods=server_lr_schedule", SERVER_LR)
        raise ValueError(f"setting '{name}' needs {needed}; it has no effect {values}; remove it")


def dead(runs: Sequence[Run], but: str = "") -> Iterator[tuple[str, Run]]:
    """Yield each setting that does nothing in any of the runs that state it, and the first of these.

    Those that need the setting `but`, with any value, are left out: it may be set later.
    """
    for name, of in SETTINGS.items():
        having = [run for run in runs if of.needs and name in run.stated]
        later = but in of.needs and not of.needs[but]
        if having and not later and not any(r.meets(of.needs) for r in having):
            yield name, having[0]


def _privacy(settings: Settings, only_check: bool) -> CentralDP:
    """Return central differential privacy with a new accountant, for one client replaced."""
    from flwr_regs import CentralDP

    if settings.dp_noise == 0 or only_check:
        return CentralDP(settings.dp_clip_norm, settings.dp_noise)
    from flwr_regs.flower.compat import privacy_accounting

    flower = privacy_accounting()
    config = flower.PrivacyConfig(
        target_delta=settings.dp_delta,
        population_size=settings.num_clients,
        neighboring_relation=flower.NeighboringRelation.REPLACE_ONE,
        sampling_method=flower.SamplingMethod.WITHOUT_REPLACEMENT,
    )
    # Every order gives a bound; the smallest counts. The default's large ones take half a second each.
    orders = (*(1 + x / 10 for x in range(1, 20)), *range(3, 33), 40, 48, 64, 128)
    try:
        accountant = flower.RdpAccountant(config, tuple(map(float, orders)))
    except ImportError as error:
        missing = missing_extra("dp-accounting", "setting 'dp-clip-norm'", "privacy")
        raise ValueError(f"{missing}, or dp-noise=0, which protects nobody") from error
    return CentralDP(settings.dp_clip_norm, settings.dp_noise, accountant)


@lru_cache(maxsize=2)
def initial_model(*arguments: Any) -> ArrayRecord:
    """Return the initial model, after a check; it is drawn once for many methods."""
    from flwr.app import ArrayRecord

    from flwr_regs.experiments.models import models

    return ArrayRecord(models.check(*arguments).state_dict())
