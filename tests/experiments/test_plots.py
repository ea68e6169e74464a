"""Pictures: what the drawn artists say, and that no text covers another. Nothing is read from pixels."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from flwr_regs.experiments.report import drawing, plots
from flwr_regs.experiments.report.plots import Curve

NAN = float("nan")
WORDS = ["FedAvg", "FedFOR(alpha=0.5)", "a b", "x" * 40, "$_^{", "FedBN+FedFOR(alpha=0.1, lr=0.05)"]


def run(label: str, seed: int, accuracy: Any, start: int = 0, **fields: Any) -> Curve:
    rounds = range(start, start + len(accuracy))
    known = {"megabytes": [0.2 * r for r in rounds], "seconds": [1.5 * r for r in rounds]}
    return Curve(label, seed, rounds, accuracy, **{**known, **fields})


def sampled(seeds: int, rounds: int = 6, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(0.2, 0.9, (seeds, rounds))


def artists(figure: Figure, gid: str) -> list[Any]:
    return figure.findobj(lambda artist: artist.get_gid() == gid)


def caption(figure: Figure) -> str:
    return str(artists(figure, "caption")[0].get_text()).replace("\n", " ")


def written(figure: Figure) -> list[str]:
    """The labels in the right margin, in one line each."""
    return [t.get_text().replace("\n", " ").replace("\xa0", " ") for t in artists(figure, "label")]


def assert_legible(figure: Figure) -> None:
    """No text covers another or is cut off, at the resolutions of the files and of a screen."""
    with drawing.style():
        for resolution in (72, 200):
            figure.set_dpi(resolution)
            assert_texts_apart(figure)


def assert_texts_apart(figure: Figure) -> None:
    drawn = []
    draw = Text.draw

    def noted(text: Text, *args: Any, **kwargs: Any) -> None:  # there are more texts than are drawn
        if text.get_visible() and text.get_text().strip():
            drawn.append(text)
        draw(text, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", noted)
        figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn]
    assert len(boxes) > 3
    for name, box in boxes:
        assert box.x0 >= 0, name
        assert box.y0 >= 0, name
        assert box.x1 <= figure.bbox.x1, name
        assert box.y1 <= figure.bbox.y1, name
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        assert apart, (one, other)
    for label in artists(figure, "label"):
        assert label.get_window_extent().x0 > figure.axes[0].bbox.x1


@pytest.mark.parametrize("x", ["round", "megabytes", "seconds"])
def test_line_and_band_are_the_mean_and_the_sample_deviation(x: str) -> None:
    values = sampled(4)
    spent = 1 + np.arange(6) + sampled(4, seed=1)
    curves = [
        run("A", k, v, megabytes=s, seconds=2 * s)
        for k, (v, s) in enumerate(zip(values, spent, strict=True))
    ]
    figure = plots.accuracy(curves, x=x)
    (line,) = artists(figure, "mean A")
    expected = {"round": np.arange(6), "megabytes": spent.mean(0), "seconds": 2 * spent.mean(0)}[x]
    np.testing.assert_allclose(line.get_xdata(), expected)
    np.testing.assert_allclose(line.get_ydata(), 100 * values.mean(0))
    (band,) = artists(figure, "band A")
    drawn = {(round(a, 6), round(b, 6)) for a, b in band.get_paths()[0].vertices}
    for sign in (-1, 1):
        edge = 100 * (values.mean(0) + sign * values.std(0, ddof=1))
        assert drawn >= {(round(a, 6), round(b, 6)) for a, b in zip(expected, edge, strict=True)}


def test_seeds_that_measured_other_rounds_are_averaged_over_the_common_ones() -> None:
    figure = plots.accuracy([run("A", 1, [0.1, 0.2, 0.3, 0.4]), run("A", 2, [0.4, 0.5], start=1)])
    (line,) = artists(figure, "mean A")
    assert list(line.get_xdata()) == [1, 2]
    np.testing.assert_allclose(line.get_ydata(), [30, 40])


@pytest.mark.parametrize(
    ("seeds", "stopped", "expected"),
    [
        ({"A": 5}, {}, "Mean and standard deviation over n = 5 seeds."),
        ({"A": 1, "B": 1}, {}, "n = 1 seed."),
        ({"A": 5, "B": 5, "C": 3}, {}, "Mean and standard deviation over n = 5 seeds (C: n = 3)."),
        ({"A": 2, "B": 1}, {}, "Mean and standard deviation over n = 2 seeds (B: n = 1)."),
        ({"A": 3}, {"A": 1}, "Mean and standard deviation over n = 3 seeds. Thin line with a cross: a run "
         "that stopped there; it is in no mean."),
        ({}, {"A": 2}, "Thin line with a cross: a run that stopped there; none finished."),
    ],
)  # fmt: skip
def test_caption_says_n(seeds: dict[str, int], stopped: dict[str, int], expected: str) -> None:
    curves = [run(label, k, sampled(1)[0]) for label, n in seeds.items() for k in range(n)]
    curves += [
        run(label, 10 + k, [0.5], stopped="loss") for label, n in stopped.items() for k in range(n)
    ]
    figure = plots.accuracy(curves)
    assert caption(figure) == expected
    for label in {*seeds, *stopped}:
        assert bool(artists(figure, f"band {label}")) == (seeds.get(label, 0) > 1)


def test_stopped_runs_are_drawn_to_where_they_stop_and_counted() -> None:
    whole = sampled(2)
    broken = [
        run("A", 3, [0.1, 0.2, 0.15], stopped="loss is inf"),
        run("A", 4, [0.1, 0.3, 0.4, NAN, 0.5, 0.6]),
        run("A", 5, [0.1, float("inf")]),
        run("A", 6, [], stopped="no client came"),
    ]
    figure = plots.accuracy([*broken, *(run("A", k, v) for k, v in enumerate(whole))])
    np.testing.assert_allclose(artists(figure, "mean A")[0].get_ydata(), 100 * whole.mean(0))
    lines = artists(figure, "stopped A")
    assert [list(line.get_xdata()) for line in lines] == [[0, 1, 2], [0, 1, 2], [0], []]
    np.testing.assert_allclose(lines[1].get_ydata(), [10, 30, 40])
    crosses = artists(figure, "cross A")
    assert [list(np.round(c.get_ydata(), 6)) for c in crosses] == [[15], [40], [10], []]
    assert all(c.get_marker() == "x" for c in crosses)
    assert lines[0].get_linewidth() < artists(figure, "mean A")[0].get_linewidth()
    assert written(figure) == ["A (4 of 6 stopped)"]


def test_where_all_stopped_only_their_lines_are_drawn() -> None:
    figure = plots.accuracy([run("A", k, [0.1, 0.2], stopped="loss") for k in range(3)])
    assert len(artists(figure, "stopped A")) == 3
    assert not artists(figure, "mean A")
    assert written(figure) == ["A (3 of 3 stopped)"]
    assert_legible(plots.accuracy([run("A", 1, [], stopped="loss")]))


@pytest.mark.parametrize("seed", range(15))
def test_no_text_covers_another_or_is_cut_off(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9)) if seed % 3 else int(rng.integers(9, 25))
    curves = []
    for i in range(count):
        label = f"{rng.choice(WORDS)} {i} {rng.choice(WORDS)}"[: rng.integers(3, 60)] + str(i)
        end = rng.choice([0.5, rng.uniform(0, 1)])  # many lines end at one height
        size = 10 ** rng.uniform(-3, 3)
        known = {"megabytes": [0, size, 2 * size], "stopped": "loss" if rng.random() < 0.2 else ""}
        curves += [run(label, k, [0.1, 0.4, end], **known) for k in range(2)]
    title = " ".join(rng.choice(WORDS, rng.integers(0, 14)))
    target = float(rng.uniform(0, 1)) if rng.random() < 0.7 else None
    x = str(rng.choice(list(plots.AXES)))
    figure = plots.accuracy(curves, x=x, title=title, target=target, ordered=bool(seed % 2))
    assert_legible(figure)
    assert len(artists(figure, "label")) == count + (target is not None)
    assert bool(artists(figure, "leader")) == (count <= 8)


@pytest.mark.parametrize("seed", range(20))
def test_boxes_are_moved_apart_by_the_least_squares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(0.1, 1, rng.integers(1, 9))
    wanted = (
        rng.choice([rng.uniform(0, 6), 2.0], len(sizes))
        if seed % 2
        else rng.uniform(0, 6, len(sizes))
    )
    low, high = 0.0, sizes.sum() + rng.uniform(0, 3)
    centres = drawing.spread(wanted, sizes, low, high)

    def fits(y: Any) -> bool:
        order = np.argsort(y)
        gaps = np.diff(y[order]) - (sizes[order][1:] + sizes[order][:-1]) / 2
        ends = (y - sizes / 2).min() >= low - 1e-9 and (y + sizes / 2).max() <= high + 1e-9
        return bool(ends and (gaps >= -1e-9).all())

    assert fits(centres)
    assert all(
        np.diff(centres[np.argsort(wanted, kind="stable")]) > 0
    )  # lines to the boxes never cross
    cost = ((centres - wanted) ** 2).sum()
    for _ in range(300):
        other = centres + rng.normal(0, 0.05, len(sizes)) * (rng.random(len(sizes)) < 0.5)
        same_order = (np.argsort(other) == np.argsort(centres)).all()
        assert not (same_order and fits(other) and ((other - wanted) ** 2).sum() < cost - 1e-9)


@pytest.mark.parametrize(
    ("first", "last"), [(0, 1), (0, 3), (1, 3), (0, 30), (1, 30), (5, 7), (0, 1000), (4, 4)]
)
def test_round_ticks_are_whole_and_begin_at_round_0_where_measured(first: int, last: int) -> None:
    accuracy = np.linspace(0.2, 0.8, last - first + 1)
    axes = plots.accuracy([run("A", 1, accuracy, start=first)]).axes[0]
    low, high = axes.get_xlim()
    ticks = [t for t in axes.get_xticks() if low <= t <= high]
    assert 1 <= len(ticks) <= 10
    assert all(t == int(t) for t in ticks)
    assert all(first <= t <= last for t in ticks)
    assert first or ticks[0] == 0


def test_megabytes_are_logarithmic_only_where_totals_differ_much() -> None:
    def scale(total: float, x: str) -> str:
        two = [
            run(name, 1, [0.1, 0.5, 0.6], megabytes=[0, m / 2, m])
            for name, m in (("A", 1), ("B", total))
        ]
        axes = plots.accuracy(two, x=x).axes[0]
        if axes.get_xscale() == "log":
            assert all((line.get_xdata() > 0).all() for line in axes.lines)
        return str(axes.get_xscale())

    assert scale(29, "megabytes") == "linear"
    assert scale(31, "megabytes") == "log"
    assert scale(31, "seconds") == "linear"


def test_accuracy_fills_the_height_and_stays_inside() -> None:
    axes = plots.accuracy([run("A", 1, [0.981, 0.989])]).axes[0]
    assert 97 < axes.get_ylim()[0] < 98.1
    assert 98.9 < axes.get_ylim()[1] < 100
    axes = plots.accuracy([run("A", 1, [0.5, 0.5])], target=0.925).axes[0]
    assert axes.get_ylim()[0] < 50 < 92.5 < axes.get_ylim()[1]


def test_target_is_written_at_its_line() -> None:
    figure = plots.accuracy([run("A", 1, [0.1, 0.5])], target=0.925)
    assert written(figure) == ["A", "target 92.5 %"]
    text = artists(figure, "label")[1].get_window_extent()
    height = figure.axes[0].transData.transform((0, 92.5))[1]
    assert text.y0 < height < text.y1


def test_labels_stand_in_the_order_of_the_lines() -> None:
    ends = np.random.default_rng(0).permutation(12)
    for count in (6, 12):
        figure = plots.accuracy([run(f"m{e}", 1, [0.1, 0.4 + 0.04 * e]) for e in ends[:count]])
        by_height = sorted(artists(figure, "label"), key=lambda t: -t.get_position()[1])
        names = [int(t.get_text()[1:]) for t in by_height]
        assert names == sorted(names, reverse=True)


def test_one_of_two_equal_lines_shows_through_the_other() -> None:
    figure = plots.accuracy([run(label, 1, [0.1, 0.5]) for label in "ABCDEFG"])
    lines = [artists(figure, f"mean {label}")[0] for label in "ABCDEFG"]
    for one, other in itertools.combinations(lines, 2):
        assert other.get_linewidth() < one.get_linewidth()
        solid = other.get_linestyle() == "-"
        assert solid or other.get_zorder() > one.get_zorder()


def test_thirty_five_looks_differ_and_ordered_colours_grow_lighter() -> None:
    with drawing.style():
        looks = [drawing.look(i, 35, False) for i in range(35)]
        ordered = [drawing.look(i, 9, True)["color"] for i in range(9)]
    assert looks[0]["color"] == "#000000"
    assert len({(x["color"], x["linestyle"]) for x in looks}) == 35
    light = [np.dot(c[:3], [0.299, 0.587, 0.114]) for c in ordered]
    assert light == sorted(light)
    assert light[-1] < 0.75


def test_clients_quartiles_are_over_the_whole_runs() -> None:
    values = sampled(3, 20)
    curves = [run("A", k, [0.5], clients=v) for k, v in enumerate(values)]
    curves += [run("A", 9, [0.5], clients=[0.0] * 20, stopped="loss")]
    curves += [run("B", 1, [0.5], clients=[*values[0], NAN])]
    figure = plots.clients(curves)
    for label, expected in (("A", values.ravel()), ("B", values[0])):
        quartiles = np.quantile(100 * expected, [0.25, 0.5, 0.75])
        np.testing.assert_allclose(
            artists(figure, f"quartiles {label}")[0].get_xdata(), quartiles[::2]
        )
        np.testing.assert_allclose(
            artists(figure, f"median {label}")[0].get_xdata(), [quartiles[1]] * 2
        )
        (points,) = artists(figure, f"points {label}")
        moved = np.sort(points.get_xdata()) - np.sort(100 * expected)
        assert np.abs(moved).max() <= 70 / 150
        places = list(zip(points.get_xdata(), points.get_ydata(), strict=True))
        assert len(set(places)) == expected.size
    assert figure.axes[0].get_yticklabels()[0].get_text() == "A (1 of 4 stopped)"
    assert "20 to 21 clients" in caption(figure)
    assert "n = 3 seeds (B: n = 1)" in caption(figure)


@pytest.mark.parametrize(("methods", "clients"), [(1, 3), (2, 10), (9, 10), (24, 50)])
def test_clients_pictures_are_legible(methods: int, clients: int) -> None:
    values = sampled(methods, clients)
    names = [
        f"{WORDS[i % 6]} {i} {WORDS[-1 - i % 6]} {WORDS[3]} {WORDS[3]}" for i in range(methods)
    ]
    figure = plots.clients(
        [run(n, 1, [0.5], clients=v) for n, v in zip(names, values, strict=True)]
    )
    assert_legible(figure)


SIZES = [(5, 2), (5, 100), (10, 10), (20, 10), (30, 3), (200, 2), (200, 100), (1, 1)]


@pytest.mark.parametrize(("clients", "classes"), SIZES)
@pytest.mark.parametrize("most", [9, 300_000])
def test_label_spread_shows_all_counts(clients: int, classes: int, most: int) -> None:
    counts = np.random.default_rng(0).integers(0, most, (clients, classes), endpoint=True)
    names = [f"kind {c}" for c in range(classes)] if classes < 11 else None
    figure = plots.labels(counts, title="MNIST", class_names=names)
    assert_legible(figure)
    assert (figure.axes[0].images[0].get_array().filled(0) == counts.T).all()
    totals = counts.sum(axis=1)
    assert [bar.get_height() for bar in artists(figure, "totals")] == list(totals)
    numbers = [int(t.get_text().replace(",", "")) for t in artists(figure, "count")]
    assert numbers in ([], [n for n in counts.ravel() if n])
    few = clients * classes <= 200
    assert bool(numbers) == (few and (most == 9 or clients <= 10) and classes < 100), len(numbers)
    for limits, ticks in (
        (clients, figure.axes[0].get_xticks()),
        (classes, figure.axes[0].get_yticks()),
    ):
        assert all(t == int(t) for t in ticks if 0 <= t < limits)
    assert f"{totals.sum():,} examples" in caption(figure)


def picture() -> Figure:
    curves = [run(label, k, v) for label in "AB" for k, v in enumerate(sampled(3))]
    return plots.accuracy(curves, target=0.85, title="one")


def test_png_and_pdf_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = picture()
    for name, base in (("a", "a"), ("b.png", "b"), ("c.pdf", "c"), ("alpha=0.1", "alpha=0.1")):
        paths = plots.save(figure, tmp_path / "new" / name)
        assert [p.name for p in paths] == [f"{base}.png", f"{base}.pdf"]
    before = paths[0].read_bytes()
    assert int.from_bytes(before[16:20], "big") == round(6.3 * 200)
    assert b"/Type3" not in paths[1].read_bytes()  # the text is text
    assert b"CreationDate" not in paths[1].read_bytes()

    def half(path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(KeyboardInterrupt):
        plots.save(figure, paths[0])
    assert paths[0].read_bytes() == before
    assert len(list((tmp_path / "new").iterdir())) == 8


def test_equal_figures_give_equal_bytes_whatever_the_users_style(tmp_path: Path) -> None:
    first = [p.read_bytes() for p in plots.save(picture(), tmp_path / "a")]
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "pdf.fonttype": 3}):
        assert [p.read_bytes() for p in plots.save(picture(), tmp_path / "b")] == first
        assert matplotlib.rcParams["font.size"] == 20
    code = (
        "import sys; from tests.experiments.test_plots import picture, plots; "
        f"plots.save(picture(), {str(tmp_path / 'c')!r}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert [(tmp_path / f"c.{kind}").read_bytes() for kind in ("png", "pdf")] == first


def test_a_notebook_shows_the_figure() -> None:
    assert picture()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_the_style_file_travels_with_a_flower_app() -> None:
    from flwr.common.constant import FAB_INCLUDE_PATTERNS

    (style,) = Path(plots.__file__).parent.glob("mplstyle*")
    assert f"**/*{style.suffix}" in FAB_INCLUDE_PATTERNS


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: plots.accuracy([]), "no curves to draw"),
        (lambda: plots.accuracy([run("A", 1, [0.5])], x="bytes"), "'bytes': expected one of round, meg"),
        (lambda: plots.accuracy([run("A", 1, [0.5])] * 2), "'A' has 2 runs with seed 1"),
        (lambda: plots.accuracy([run("A", 1, [0.5]), run("A", 2, [0.5], 3)]), "'A' have no round in"),
        (lambda: plots.accuracy([run("A", 1, [0.5], seconds=[NAN])], x="seconds"), "seconds holds"),
        (lambda: run("A", 1, [0.5], seconds=[]), "seconds has 0 values for 1 rounds"),
        (lambda: Curve("A", 1, [1, 1], [0, 0], [0, 0], [0, 0]), "rounds must increase"),
        (lambda: plots.clients([run("A", 1, [0.5])]), "no whole run holds the clients' accuracies"),
        (lambda: plots.labels(np.ones((2, 2))), "float64 of shape (2, 2): expected integers"),
        (lambda: plots.labels(np.ones(2, int)), "of shape (2,): expected"),
        (lambda: plots.labels(-np.ones((2, 2), int)), "from 0 on"),
        (lambda: plots.labels(np.ones((2, 2), int), class_names=["a"]), "1 class names for 2 classes"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    assert sentence in str(caught.value)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flwr_regs.experiments.report.drawing")
    monkeypatch.delattr(sys.modules["flwr_regs.experiments"], "drawing")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda: plots.accuracy([run("A", 1, [0.5])]), lambda: plots.labels([[1]])):
        with pytest.raises(ImportError, match=r"a picture needs matplotlib"):
            draw()
