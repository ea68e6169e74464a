"""Pictures: what the drawn artists say, and that no text covers another. Nothing is read from pixels."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from flwr_regs.experiments.report import cell_pictures, drawing, plots
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
    assert figure.axes[0].get_yticklabels()[0].get_text() == "A (1\u00a0of\u00a04\u00a0stopped)"
    assert "20 to 21 clients" in caption(figure)
    assert "n = 3 seeds (B: n = 1)" in caption(figure)


@pytest.mark.parametrize("seed", range(4))
def test_labels_stand_in_the_order_of_the_lines_and_no_text_covers_another(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9)) if seed % 3 else int(rng.integers(9, 25))
    curves, ends = [], {}
    for i in range(count):
        label = f"{rng.choice(WORDS)} {i} {rng.choice(WORDS)}"[: rng.integers(3, 60)] + str(i)
        ends[label] = rng.choice([0.5, rng.uniform(0, 1)])  # many lines end at one height
        known = {"megabytes": [0, *(np.array([1, 2]) * 10 ** rng.uniform(-3, 3))]}
        curves += [run(label, k, [0.1, 0.4, ends[label]], **known) for k in range(2)]
    title = " ".join(rng.choice(WORDS, rng.integers(0, 14)))
    ordered = bool(seed % 2)
    x = str(rng.choice(list(plots.AXES)))
    figure = plots.accuracy(curves, x=x, title=title, target=0.925, ordered=ordered)
    assert_legible(figure)
    assert all(t.get_window_extent().x0 > figure.axes[0].bbox.x1 for t in artists(figure, "label"))
    wanted = [*ends, "target 92.5 %"]
    if not ordered:
        wanted.sort(key=lambda label: -ends.get(label, 0.925))
    assert [text.replace(" ", "") for text in written(figure)] == [
        label.replace(" ", "") for label in wanted
    ]


@pytest.mark.parametrize(("first", "last"), [(0, 30), (5, 7), (4, 4)])
def test_round_ticks_are_whole_and_begin_at_round_0_where_measured(first: int, last: int) -> None:
    accuracy = np.linspace(0.2, 0.8, last - first + 1)
    axes = plots.accuracy([run("A", 1, accuracy, start=first)]).axes[0]
    low, high = axes.get_xlim()
    ticks = [t for t in axes.get_xticks() if low <= t <= high]
    assert 1 <= len(ticks) <= 10
    assert all(t == int(t) and first <= t <= last for t in ticks)
    assert first or ticks[0] == 0


def test_caption_says_n() -> None:
    curves = [run(label, k, sampled(1)[0]) for label, n in (("A", 5), ("C", 3)) for k in range(n)]
    usual = "Mean and standard deviation over n = 5 seeds (C: n = 3)."
    assert caption(plots.accuracy(curves)) == usual
    broken = run("A", 9, [0.5], stopped="loss")
    stopped = "Thin line with a cross: a run that stopped there; "
    assert caption(plots.accuracy([*curves, broken])) == f"{usual} {stopped}it is in no mean."
    assert caption(plots.accuracy([broken])) == f"{stopped}none finished."
    assert caption(plots.accuracy(curves[:1])) == "n = 1 seed."


@pytest.mark.parametrize(
    ("clients", "classes", "most"),
    [(20, 10, 9), (10, 10, 300_000), (200, 2, 9), (1, 1, 9)],
)
def test_label_spread_shows_all_counts(clients: int, classes: int, most: int) -> None:
    counts = np.random.default_rng(0).integers(0, most, (clients, classes), endpoint=True)
    names = [f"kind {c}" for c in range(classes)] if classes < 11 else None
    figure = cell_pictures.labels(counts, title="MNIST", class_names=names)
    assert_legible(figure)
    (image,) = (axes.images[0] for axes in figure.axes if axes.images)
    assert (image.get_array().filled(0) == counts.T).all()
    totals = counts.sum(axis=1)
    assert [bar.get_height() for bar in artists(figure, "totals")] == list(totals)
    numbers = [int(t.get_text().replace(",", "")) for t in artists(figure, "count")]
    shown = [n for n in counts.ravel() if n] if clients * classes <= 200 and clients < 200 else []
    assert numbers == shown
    assert f"{totals.sum():,} examples" in caption(figure)


def test_inputs_and_swaps_are_drawn_as_they_are() -> None:
    images = np.random.default_rng(0).random((3, 2, 1, 4, 5))
    figure = cell_pictures.inputs(images, [*"abc"], caption="The same examples.")
    assert_legible(figure)
    shown = [axes.images[0].get_array()[..., 0] for axes in figure.axes]
    scaled = (images - images.min()) / np.ptp(images)
    np.testing.assert_allclose(shown, scaled[:, :, 0].swapaxes(0, 1).reshape(6, 4, 5))
    table = np.array([[0, 1, 2], [1, 0, 2], [1, 0, 2]])
    figure = cell_pictures.swaps(table, title="swaps")
    assert_legible(figure)
    assert "In 2 rounds, two labels swap 1 times." in caption(figure)
    assert written(figure) == list("012102102")


def picture() -> Figure:
    curves = [run(label, k, v) for label in "AB" for k, v in enumerate(sampled(3))]
    return plots.accuracy(curves, target=0.85, title="one")


def test_files_are_whole_and_equal_whatever_the_users_style(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = drawing.save(picture(), tmp_path / "new/alpha=0.1")
    assert [p.name for p in paths] == ["alpha=0.1.png", "alpha=0.1.pdf"]
    first = [p.read_bytes() for p in paths]
    assert int.from_bytes(first[0][16:20], "big") == round(6.3 * 200)
    assert b"/Type3" not in first[1]  # the text is text
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "pdf.fonttype": 3}):
        figure = picture()
        assert [p.read_bytes() for p in drawing.save(figure, tmp_path / "b.png")] == first
        assert matplotlib.rcParams["font.size"] == 20
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]

    def half(path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(KeyboardInterrupt):
        drawing.save(figure, paths[0])
    assert paths[0].read_bytes() == first[0]
    assert len(list(paths[0].parent.iterdir())) == 2


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: plots.accuracy([run("A", 1, [0.5])] * 2), "'A' has 2 runs with seed 1"),
        (lambda: plots.accuracy([run("A", 1, [0.5]), run("A", 2, [0.5], 3)]), "'A' have no round in"),
        (lambda: plots.accuracy([run("A", 1, [0.5], seconds=[NAN])], x="seconds"), "seconds holds"),
        (lambda: run("A", 1, [0.5], seconds=[]), "seconds has 0 values for 1 rounds"),
        (lambda: plots.clients([run("A", 1, [0.5])]), "no whole run holds the clients' accuracies"),
        (lambda: cell_pictures.labels(np.ones((2, 2))), "float64 of shape (2, 2): expected integers"),
        (lambda: cell_pictures.labels(np.ones((2, 2), int), class_names=["a"]), "1 class names for 2"),
        (lambda: cell_pictures.inputs(np.ones((2, 2)), "ab"), "has the shape (2, 2): expected (clients,"),
        (lambda: cell_pictures.swaps(np.ones((2, 2))), "expected integers, (rounds + 1, classes)"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    assert sentence in str(caught.value)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flwr_regs.experiments.report.drawing")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"a picture needs matplotlib"):
        importlib.import_module("flwr_regs.experiments.report.drawing")
