"""Pictures: what the drawn artists say, and that no text covers another. Nothing is read from pixels."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from flwr_regs.experiments import cli
from flwr_regs.experiments.report import drawing, partition_plot, plots, statistics, tried
from flwr_regs.experiments.report.drawing import Look
from flwr_regs.experiments.report.results import PICTURES, Results
from tests.experiments.report.test_results import run as recorded

WORDS = ["FedAvg", "FedFOR(alpha=0.5)", "a b", "x" * 40, "$_^{", "FedBN+FedFOR(alpha=0.1, lr=0.05)"]


def run(label: str, seed: int, accuracy: Any, start: int = 0, **more: Any) -> pd.DataFrame:
    """A run whose rounds take 0.2 MB and 1.5 s, and whose loss is a hundredth of the accuracy."""
    rounds = np.arange(start, start + len(accuracy), dtype=float)
    columns = {"accuracy": accuracy, "loss": np.asarray(accuracy, float) / 100, "part": "whole"}
    columns |= {"hours": rounds / 60}
    columns |= {"megabytes": 0.2 * rounds, "seconds": 1.5 * rounds, **more}
    return pd.DataFrame({"label": label, "seed": seed, "round": rounds, **columns})


def drawn(curves: list[pd.DataFrame], *axes: str, **settings: Any) -> drawing.Picture:
    return plots.over_rounds(pd.concat(curves), *axes, **settings)


def sampled(seeds: int, rounds: int = 6, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(20, 90, (seeds, rounds))


def artists(figure: Figure, gid: str) -> list[Any]:
    return figure.findobj(lambda artist: artist.get_gid() == gid)


def text_of(figure: Figure, gid: str) -> str:
    texts = [t.get_text().replace("\n", " ").replace("\xa0", " ") for t in artists(figure, gid)]
    return "|".join(texts)


def assert_legible(figure: Figure) -> None:
    """No text covers another or is cut off, at the resolutions of the files and of a screen."""
    draw, written = Text.draw, list[Text]()

    def noted(text: Text, *args: Any, **kwargs: Any) -> None:  # there are more texts than are drawn
        if text.get_visible() and text.get_text().strip():
            written.append(text)
        draw(text, *args, **kwargs)

    for resolution in (72, 200):
        written.clear()
        figure.set_dpi(resolution)
        with drawing.style(Look()), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Text, "draw", noted)
            figure.draw_without_rendering()
        boxes = [(text.get_text(), text.get_window_extent()) for text in written]
        assert len(boxes) > 3
        for name, box in boxes:
            assert (box.min >= 0).all(), name
            assert (box.max <= figure.bbox.max).all(), name
        for (one, a), (other, b) in itertools.combinations(boxes, 2):
            apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
            assert apart, (one, other)


@pytest.mark.parametrize(
    ("x", "y"), [("round", "accuracy"), ("megabytes", "loss"), ("seconds", "accuracy")]
)
def test_line_and_band_are_the_mean_and_its_spread_and_stopped_runs_are_beside(
    x: str, y: str
) -> None:
    values = sampled(4)
    spent = 1 + np.arange(6) + sampled(4, seed=1)
    pairs = enumerate(zip(values, spent, strict=True))
    curves = [run("A", k, v, megabytes=s, seconds=2 * s) for k, (v, s) in pairs]
    curves += [run("A", 8, [10, 20, 15], part="stopped"), run("A", 9, [10, 30, 40, np.nan, 50, 60])]
    curves += [run("B", k, v, megabytes=spent[0]) for k, v in enumerate(sampled(3))]
    figure = drawn(curves, x, y)
    unit = 100 if y == "loss" else 1
    values = values / unit
    (line,), (band,) = artists(figure, "mean A"), artists(figure, "band A")
    expected = {"round": np.arange(6), "megabytes": spent.mean(0), "seconds": 2 * spent.mean(0)}[x]
    np.testing.assert_allclose(line.get_xdata(), expected)
    np.testing.assert_allclose(line.get_ydata(), values.mean(0))
    spread = values.std(0, ddof=1) * 3.182446 / 2  # t(0.975, 3), 4 seeds
    edges = band.get_paths()[0].vertices
    for edge in (values.mean(0) - spread, values.mean(0) + spread):
        within = edge.clip(0, 100 if y == "accuracy" else None)
        for point in zip(expected, within, strict=True):
            assert np.isclose(edges, point, rtol=1e-6).all(axis=1).any()
    ends = zip(artists(figure, "stopped A"), artists(figure, "cross A"), strict=True)
    for wanted, (thin, cross) in zip(([10, 20, 15], [10, 30, 40]), ends, strict=True):
        np.testing.assert_allclose(thin.get_ydata(), np.array(wanted) / unit)
        np.testing.assert_allclose(cross.get_ydata(), [wanted[-1] / unit])
    assert "A (2 of 6 stopped)" in text_of(figure, "label")
    caption = text_of(figure, "caption")
    assert caption.startswith("Mean and 95 % interval over n = 4 seeds (B: n = 3). ")
    assert caption.endswith("a run that stopped there; the mean leaves it out.")
    assert ("By the clock" in caption) == (x == "seconds")
    assert "none finished" in text_of(drawn(curves[4:6]), "caption")
    going = drawn([*curves[:4], run("A", 8, [10, 20], part="unfinished")], x, y)
    assert len(artists(going, "stopped A")) == 1
    assert not artists(going, "cross A")
    assert "A (1 of 5 unfinished)" in text_of(going, "label")
    assert text_of(going, "caption").endswith("a run that has not ended; the mean leaves it out.")


def test_an_axis_of_accuracies_leaves_out_the_first_rounds_of_many() -> None:
    """Not of few rounds, not where a run ends low, and not if the look says what is drawn."""
    rises = [10, 50, 88, *range(90, 98)]
    figure = drawn([first := run("A", 1, rises), run("B", 1, rises)])
    assert 86 < figure.axes[0].get_ylim()[0] < 88
    assert text_of(figure, "caption").endswith("of the first rounds are not shown.")
    for curves in ([run("A", 1, rises[:9])], [first, run("B", 1, [10, 9], part="stopped")]):
        figure = drawn(curves)
        assert figure.axes[0].get_ylim()[0] < 10
        assert "not shown" not in text_of(figure, "caption")
    two = drawn([run("A", 1, [2, 90]), run("A", 2, [40, 95])])  # no line has a seed's 2
    assert "not shown" not in text_of(two, "caption")
    dip = run("A", 2, [*rises[:6], 60, *rises[7:]])
    figure = drawn([first, dip, run("A", 3, rises)])
    edges = artists(figure, "band A")[0].get_paths()[0].vertices
    low = edges[edges[:, 0] == 6, 1].min()
    assert figure.axes[0].get_ylim()[0] < low < 60  # a band, and a single run, count
    assert drawn([first], target=30.0).axes[0].get_ylim()[0] < 30
    assert drawn([run("A", 1, [90] * 12)]).axes[0].get_ylim()[0] < 90
    assert drawn([first], look=Look(accuracy=(5, 100))).axes[0].get_ylim()[0] == 5


def test_seeds_are_averaged_over_the_rounds_that_all_of_them_have() -> None:
    few, many = run("A", 2, [40, 50], start=1), run("A", 1, [10, 20, 30, 40])
    (line,) = artists(drawn([many, few]), "mean A")
    assert line.get_xydata().tolist() == [[1, 30], [2, 40]]
    assert not artists(drawn([few, run("A", 1, [10], start=3)]), "mean A")  # none in common
    with pytest.raises(ValueError, match=r"one of round, megabytes, .* not 'time'"):
        drawn([few], "time")


def test_clients_are_quantiles_of_each_seed() -> None:
    values = sampled(3, 20) / 100
    clients = [{"clients": v.tolist()} for v in values]
    records = [recorded("A", [0.5], s, per_client=v) for s, v in enumerate(clients)]
    records.append(recorded("A", [0.5], 9, error="diverged", diverged=True))
    table = Results(records).clients().set_index(["method", "seed", "client"])["accuracy"]
    assert (len(table), table["A", 1, 7]) == (60, values[1, 7])
    assert not Results(records).clients()["measured"].any()  # expected, from label shares
    with pytest.raises(ValueError, match="y must be one of accuracy, not 'loss'"):
        Results(records).plot("clients", "loss")
    figure = Results(records, baseline="A").plot("clients")
    (line,), (band,) = artists(figure, "mean A"), artists(figure, "band A")
    each = 100 * np.sort(values)[:, [0, -1]]
    assert line.get_xdata()[[0, -1]].tolist() == [0, 100]
    np.testing.assert_allclose(line.get_ydata()[[0, -1]], each.mean(0))
    np.testing.assert_allclose(line.get_ydata()[10], 100 * np.sort(values)[:, 10].mean())
    low = each.mean(0)[0] - 4.302653 * each.std(0, ddof=1)[0] / 3**0.5  # t(0.975, 2)
    edges = band.get_paths()[0].vertices
    assert np.isclose(edges, (0, low), rtol=1e-6).all(axis=1).any()
    assert not artists(figure, "target")
    clients[0]["clients"][3] = None  # a client without an accuracy
    (line,) = artists(Results(records).plot("clients"), "mean A")
    assert len(line.get_xdata()) == 20
    with pytest.raises(ValueError, match="no whole run holds the clients' accuracies"):
        Results(records[3:]).plot("clients")
    both = Results([recorded("Bad", [0.5], error="diverged", diverged=True), *records])
    over_rounds, over_clients = (artists(both.plot(x), "mean A")[0] for x in ("round", "clients"))
    assert over_rounds.get_color() == over_clients.get_color()


def test_ranks_are_drawn_with_their_groups_and_critical_difference() -> None:
    means = pd.Series([1.5, 2.0, 3.5, 6.0], ["A", "FedFOR(alpha=0.5)", "C", "x" * 40])
    ranks = statistics.Ranks(means, 12, 9.0, 0.03, 2.1)
    figure = plots.over_panels(ranks, title="ranks")
    assert_legible(figure)
    (dots,) = artists(figure, "ranks")
    assert dots.get_xdata().tolist() == means.tolist()
    assert [[*bar.get_ydata()] for bar in artists(figure, "group")] == [[0, 2]]
    (critical,) = artists(figure, "critical")
    assert np.ptp(critical.get_xdata()) == pytest.approx(2.1)
    assert "over 12 panels" in text_of(figure, "caption")
    assert "no difference" not in text_of(figure, "caption")
    alike = dataclasses.replace(ranks, p=0.3)
    assert "too equal ranks, to tell methods apart" in text_of(plots.over_panels(alike), "caption")


def test_differences_are_drawn_with_their_intervals_and_verdicts() -> None:
    ends = {"Base": (0.5, 0.6, 0.7), "Far": (0.9, 1.0, 0.99), "Bad": (0.1, 0.2, 0.29)}
    long = "SparseTernary(density_up=0.1, density_down=0.1, another=1)+LongTerm(another=2)"
    ends[long] = (0.6, 0.5, 0.6)  # its lines meet none of the next row
    ends["Near"] = (0.5,) * 3
    every = [recorded(label, [v], seed) for label, of in ends.items() for seed, v in enumerate(of)]
    figure = Results(every, baseline="Base").plot("differences")
    assert_legible(figure)
    blue, orange = plots.DECIDED[True], plots.DECIDED[False]
    for label, x, fill in (("Far", 36.33, blue), ("Bad", -40.33, orange), ("Near", -10, "white")):
        (dot,) = artists(figure, f"difference {label}")
        assert (round(dot.get_xdata()[0], 2), dot.get_markerfacecolor()) == (x, fill)
    bars = figure.axes[0].collections[0].get_segments()[0]
    assert np.ptp(bars[:, 0]) / 2 == pytest.approx(4.302653 * np.std([40, 40, 29], ddof=1) / 3**0.5)
    assert "paired by seed; n = 3 seeds" in text_of(figure, "caption")
    alone = Results(every[:6], baseline="Base")._picture("differences", "accuracy", Look())
    assert not alone.flaws
    rows = Results(every, baseline="Base").compared()
    panels = plots.differences({"one": rows, "two": rows[::-1]}, "Base")
    for label in ("Far", "Bad", "Near"):
        assert len({dot.get_ydata()[0] for dot in artists(panels, f"difference {label}")}) == 1
    with pytest.raises(ValueError, match="need a baseline, two seeds"):
        Results(every).plot("differences")


def test_tuning_is_a_map_and_a_gap_to_the_second_best() -> None:
    trials = []
    for lr, accuracy in ((0.1, 0.5), (0.2, 0.7), (0.4, 0.6), (0.8, 0.9)):
        point = {"lr": lr, "A.mu": 0.01}
        trials.append(recorded("", [0.3, accuracy], 101, row="A", point=point))
    trials[3].error, trials[3].diverged = "diverged", True
    short = recorded("", [0.99], 101, row="A", point={"lr": 0.3, "A.mu": 0.1})
    short.job["rounds"] = 9  # a rung of halving that the point did not leave
    trials.append(short)
    assert tried.table(trials)["lr"].tolist() == [0.2, 0.4, 0.1, 0.8, 0.3]
    drawn_ = tried.pictures(trials, {"A": {}}, Look())
    figure = drawn_["tuning"]
    assert_legible(figure)
    (best,) = artists(figure, "best A")
    for name, lr in (("short", 0.3), ("second", 0.4), ("lost", 0.8)):
        assert [[*of.get_xdata()] for of in artists(figure, f"{name} A")] == [[lr]]
    assert "Hollow: trained for fewer than 30 rounds" in text_of(figure, "caption")
    assert [*best.get_xdata(), *best.get_ydata()] == [0.2, 0.01]
    gap = drawn_["tuning-gap"]
    assert artists(gap, "mean A")[0].get_ydata()[-1] == pytest.approx(70)
    edges = artists(gap, "band A")[0].get_paths()[0].vertices
    assert {60.0, 70.0} <= {*np.round(edges[edges[:, 0] == 2][:, 1], 6)}
    assert gap.axes[0].get_ylabel() == "accuracy on held-out data (%)"
    assert text_of(gap, "caption").endswith("with stripes to the second best; n = 1 seed.")
    longer = [recorded("", [0.6 + 0.1 * n] * n, 101, row="A", point={"lr": n}) for n in (1, 3)]
    (line,) = artists(tried.pictures(longer, {"A": {}}, Look())["tuning-gap"], "mean A")
    assert [*line.get_xdata()] == [0, 1, 2, 3]  # also where the second best has fewer rounds
    for record, name in zip(trials, ("adam", "sgd", "adam"), strict=False):  # of no whole grid
        record.point["A.mu"] = name
    (best,) = artists(tried.pictures(trials[:3], {"A": {}}, Look())["tuning"], "best A")
    assert [*best.get_xdata(), *best.get_ydata()] == [0.2, "sgd"]
    equal = [recorded("", [0.7], 101, row="A", point={"lr": lr}) for lr in (0.1, 0.2)]
    for run_ in equal:
        (best,) = artists(tried.pictures(equal, {"A": run_.point}, Look())["tuning"], "best A")
        assert [*best.get_xdata()] == [run_.point["lr"]]
    for record, lr, mu in zip(trials, (0.1, 0.1, 0.3, 0.3), (0.0, 1e-5, 0.0, 1e-5), strict=False):
        record.point = {"lr": lr, "A.mu": mu}
    grid = tried.pictures(trials[:4], {"A": {}}, Look())["tuning"].axes[0]  # 0 has no logarithm
    assert [text.get_text() for text in grid.get_yticklabels()] == ["0", "1e-05"]
    assert grid.collections[0].get_offsets()[:3].tolist() == [[0, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_labels_stand_in_the_order_of_the_lines_and_no_text_covers_another(seed: int) -> None:
    rng = np.random.default_rng(seed)
    curves, ends = [], {}
    for i in range(int(rng.integers(1, 9)) if seed else 24):
        label = f"{rng.choice(WORDS)} {i} {rng.choice(WORDS)}"[: rng.integers(3, 60)] + str(i)
        ends[label] = rng.choice([50, rng.uniform(0, 100)])  # many lines end at one height
        known = {"megabytes": [0, *(np.array([1, 2]) * 10 ** rng.uniform(-3, 3))]}
        curves += [run(label, k, [10, 40, ends[label]], **known) for k in range(2)]
    title, ordered = " ".join(rng.choice(WORDS, 9)), bool(seed % 2)
    figure = drawn(curves, [*plots.X][seed], title=title, target=92.5, ordered=ordered)
    assert_legible(figure)
    assert all(t.get_window_extent().x0 > figure.axes[0].bbox.x1 for t in artists(figure, "label"))
    wanted = [*ends, "target 92.5 %"]
    wanted.sort(key=lambda label: -ends.get(label, 92.5))
    assert text_of(figure, "label").replace(" ", "") == "|".join(wanted).replace(" ", "")


def test_all_texts_of_a_folders_pictures_have_room_in_the_users_size_or_it_is_said() -> None:
    labels, records, trials = ["FedAdagrad(tau=0.1)", "FedAvg", "SlowMo(beta=0.6)"], [], []
    for label in labels:
        values = [0.3, 0.7, 0.92, 0.94]
        each = {"clients": [0.7, 0.8, 0.9]}
        records += [recorded(label, values, seed, per_client=each) for seed in (1, 2)]
        points = {2: {"lr": 0.02}, 3: {"lr": 1.0}}
        trials += [recorded("", values[:n], row=label, point=p) for n, p in points.items()]
    ranks = statistics.Ranks(pd.Series([1.5, 2.0, 2.5], labels), 12, 9.0, 0.03, 2.1)
    counts, results = np.full((10, 10), 99), Results(records, baseline="FedAvg")

    def picture(name: str, look: Look) -> drawing.Picture:
        if name == "ranks":
            return plots.over_panels(ranks, look=look)
        if name == "partition":
            return partition_plot.label_counts(counts, look, "")
        if name in PICTURES:
            return results._picture(*PICTURES[name], look)
        return tried.pictures(trials, {label: {} for label in labels}, look)[name]

    names = ["ranks", "partition", "tuning", "tuning-gap", *PICTURES]
    for i, name in enumerate(names):
        size, font = [((3.3, 2.4), 7), ((3.15, 2.05), 5)][i % 2]
        made = picture(name, Look("a title of some length", size, font))
        assert_legible(made)
        assert not made.flaws
    for name in ("ranks", "partition", "tuning", "accuracy"):
        made = picture(name, Look("a title of some length", (1.5, 1.5), 12))
        assert "1.5x1.5 inches have no room" in made.flaws[0]


def test_no_two_lines_look_alike() -> None:
    with drawing.style(Look()):
        looks = [drawing.line(i, 40) for i in range(40)]
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == 40
    assert len({look["color"] for look in looks[:8]}) == 8
    assert len({look["marker"] for look in looks[:9]}) == 9


def test_limits_are_what_can_be() -> None:
    curves = [run("A", k, [0, 100 - k, 100], start=1) for k in (0, 60, 90)]
    figure = drawn(curves)
    low, high = figure.axes[0].get_ylim()
    assert -1 <= low <= 0
    assert 100 <= high <= 101
    (band,) = artists(figure, "band A")
    edges = band.get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == (0, 100)
    assert figure.axes[0].get_xlim()[0] <= 0  # round 0, though it has no test
    assert "no test before round 1" in text_of(figure, "caption")
    assert "no test" not in text_of(drawn([run("A", 1, [0, 100])]), "caption")


@pytest.mark.parametrize(
    ("clients", "classes", "most"), [(10, 10, 300_000), (200, 2, 9), (1, 1, 9)]
)
def test_label_counts_are_all_shown(clients: int, classes: int, most: int) -> None:
    counts = np.random.default_rng(0).integers(0, most, (clients, classes), endpoint=True)
    figure = partition_plot.label_counts(counts, Look(), "MNIST")
    assert_legible(figure)
    (image,) = (axes.images[0] for axes in figure.axes if axes.images)
    assert (image.get_array().filled(0) == counts.T).all()
    totals = counts.sum(axis=1)
    assert [bar.get_height() for bar in artists(figure, "totals")] == list(totals)
    numbers = [int(t.get_text().replace(",", "")) for t in artists(figure, "count")]
    assert numbers == ([n for n in counts.ravel() if n] if clients < 200 else [])
    assert f"{totals.sum():,} examples" in text_of(figure, "caption")


def test_files_are_whole_and_equal_whatever_the_users_style(tmp_path: Path) -> None:
    curves = [run(label, k, v) for label in "AB" for k, v in enumerate(sampled(3))]
    paths = drawing.save(drawn(curves, title="one"), tmp_path / "new/alpha=0.1")
    assert [p.name for p in paths] == ["alpha=0.1.png", "alpha=0.1.pdf"]
    first = [p.read_bytes() for p in paths]
    assert int.from_bytes(first[0][16:20], "big") == round(6.3 * 200)
    assert Image.open(paths[0]).info["dpi"] == pytest.approx((200, 200), abs=0.1)
    assert b"/Type3" not in first[1]  # the text is text
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "pdf.fonttype": 3}):
        figure = drawn(curves, title="one")
        assert [p.read_bytes() for p in drawing.save(figure, tmp_path / "b")] == first
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_the_title_has_a_model_and_a_rate_that_are_no_defaults() -> None:
    one, two = recorded("A", [0.5, 0.6]), recorded("B", [0.5, 0.6])
    plain = text_of(Results([one, two]).plot(), "title")
    assert plain.endswith("clients")
    for record in (one, two):
        record.job |= {"model": "cnn", "lr": 0.01}
    assert text_of(Results([one, two]).plot(), "title") == f"{plain}, cnn, lr 0.01"
    two.job["lr"] = 0.1
    assert text_of(Results([one, two]).plot(), "title") == f"{plain}, cnn"


def test_results_have_a_loss_curve_and_the_users_look(tmp_path: Path) -> None:
    records = [recorded("A", [0.5, accuracy], seed) for seed, accuracy in enumerate((0.6, 0.8))]
    results = Results(records, baseline="A")
    figure = results.plot("megabytes", "loss", title="mine", size=(4, 3), font_size=10)
    assert text_of(figure, "title") == "mine"
    assert tuple(figure.get_size_inches()) == (4, 3)
    assert figure.axes[0].xaxis.label.get_size() == 10
    assert artists(figure, "mean A")[0].get_ydata().tolist() == [1, 1, 1]
    assert text_of(figure, "caption").startswith("Mean over n = 2")  # whose interval says little
    assert not artists(figure, "target")  # it is an accuracy
    results.save(tmp_path)
    assert {p.stem for p in tmp_path.glob("*.png")} == {"accuracy", "loss", "megabytes", "seconds"}
    # 1 MB at 0.75 MB/s, 0.5 MB at 0.25 MB/s, 7 times half of 2 s, 10 s, and half a second
    picture = results.plot("hours")
    hours = artists(picture, "mean A")[0].get_xdata()
    assert hours[1:] == pytest.approx(np.array([1, 2]) * (1 / 0.75 + 2 + 7 + 10 + 0.5) / 3600)


def test_some_rows_and_a_part_of_the_axis_are_drawn_and_what_is_none_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = Results([recorded(label, [0.5, 0.6]) for label in ("A", "B(x=1, y=2)", "C")])
    (alone,) = artists(results.plot(methods=["C"]), "mean C")
    assert alone.get_color() == artists(results.plot(), "mean C")[0].get_color()
    picture = results.plot(methods=["A", "B(x=1, y=2)"], accuracy=(40, 70))
    assert artists(picture, "mean A")
    assert artists(picture, "mean B(x=1, y=2)")
    assert not artists(picture, "mean C")
    assert picture.axes[0].get_ylim() == (40, 70)
    assert not picture.flaws
    with pytest.raises(ValueError, match=r"no row 'B'.*it has A, B"):
        results.plot(methods=["B"])
    assert cli.main(["run", "rounds=1", "num-clients=2", "examples=60", "out=a"]) == 0
    drawn = Path("a/accuracy.png").read_bytes()
    assert cli.main(["plot", "a", "--methods", "FedAvg", "--accuracy", "98..99"]) == 0
    assert Path("a/accuracy.png").read_bytes() != drawn
    said = capsys.readouterr()
    assert "flwr-regs plot a draws all again" in said.out
    assert "accuracy: no curve has a point from 98 to 99 %" in said.err
