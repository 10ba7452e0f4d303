"""Pictures: which there are, that what is drawn is what was measured, and that one needs no eyes and no colours."""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hand_made import ERROR, OK, PICTURES, WRONG, config, csv_rows, result, schedule_rows, table_rows, write_sweep

from pipebench.errors import ResultError
from pipebench.ledger import PARTS
from pipebench.record import Evaluation
from pipebench.report.content import Content, content_of
from pipebench.report.figures import Picture, pictures_of, rendered, themed_svg
from pipebench.report.figures.canvas import INK, MUTED, PALETTE, PAPER, RULE
from pipebench.report.figures.comparison import schedules_picture
from pipebench.report.figures.drift import drift_picture
from pipebench.report.figures.ledger import ledger_picture
from pipebench.report.figures.lines import bubble_picture, throughput_picture
from pipebench.report.figures.loss import loss_picture
from pipebench.report.figures.memory import memory_picture
from pipebench.report.figures.recompute import recompute_picture
from pipebench.report.sweep import read_sweep
from pipebench.rounding import largest_drift
from pipebench.rows import Row


@pytest.fixture(scope="module")
def content(reported: Path) -> Content:
    return content_of(read_sweep(reported))


@pytest.fixture(scope="module")
def pictures(content: Content) -> list[Picture]:
    return pictures_of(content)


def drawn(picture: Picture | None) -> Picture:
    assert picture is not None
    return picture


def texts(picture: Picture) -> list[str]:
    """Return every text of a picture: title, line below it, labels, legend."""
    from matplotlib.text import Text

    return [text.get_text() for text in picture.figure.findobj(Text) if text.get_text()]


def subtitle(picture: Picture) -> str:
    return picture.figure.texts[1].get_text().replace("\n", " ")


def bar_labels(picture: Picture) -> list[str]:
    return [label.get_text() for axes in picture.figure.axes for label in axes.get_yticklabels()]


def bars(picture: Picture) -> list[tuple[float, float]]:
    """Return where each bar begins and how long it is, in the order drawn."""
    return [(bar.get_x(), bar.get_width()) for axes in picture.figure.axes for bar in axes.patches]


def lines(picture: Picture, **look: Any) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Return x and y of the lines with this look."""
    found = [line for axes in picture.figure.axes for line in axes.lines]
    chosen = [line for line in found if all(getattr(line, f"get_{name}")() == value for name, value in look.items())]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in chosen]


def test_a_sweep_has_a_picture_of_everything_it_measured(pictures: list[Picture]) -> None:
    assert [picture.name for picture in pictures] == PICTURES  # its points have two schedules, but never at one size


def test_schedules_are_drawn_side_by_side_instead_of_lines_through_one_point() -> None:
    assert bar_labels(drawn(schedules_picture(schedule_rows())))[:5] == [
        "zb_h1",
        "interleaved, 2 stages a rank",
        "looped_bfs, 2 stages a rank",
        "gpipe",
        "1f1b",
    ]
    assert bubble_picture(schedule_rows()) is None
    assert throughput_picture(schedule_rows()) is None
    assert schedules_picture(table_rows()) is None
    assert bubble_picture(table_rows()) is not None


@pytest.mark.parametrize("status", ["wrong", "error", "pending"])
def test_a_point_that_is_no_result_is_not_drawn(status: str) -> None:
    for picture in (bubble_picture, throughput_picture, ledger_picture, memory_picture, schedules_picture):
        assert picture(table_rows(status=status)) is None
    assert len(bar_labels(drawn(ledger_picture([*table_rows(), *table_rows(status=status, micro=4)])))) == 1


def test_what_an_engine_could_not_tell_has_no_picture() -> None:
    untraced = table_rows(bubble_fraction=None, ledger_compute_s=None)
    assert bubble_picture(untraced) is None
    assert ledger_picture(untraced) is None
    assert throughput_picture(untraced) is not None


def test_the_alternatives_hold_the_numbers_of_the_csv(reported: Path, pictures: list[Picture]) -> None:
    row = {name: float(text) for name, text in csv_rows(reported)[0].items() if re.fullmatch(r"[\d.e-]+", text)}
    said = {picture.name: picture.alternative for picture in pictures}
    bubble, replayed, bound = (f"{row[f'bubble_{name}']:.3f}" for name in ("fraction", "replayed", "bound"))
    assert f"K=2, M=2: measured {bubble}, replayed {replayed}, bound {bound}." in said["bubble"]
    assert f"samples/s {row['samples_per_s']:.2f}, speed-up over one device {row['speedup']:.2f}." in said["throughput"]
    compute, fill = (f"{row[f'ledger_{part}_s'] * 1e3:.1f}" for part in ("compute", "fill_and_drain"))
    assert f"step {row['step_s'] * 1e3:.0f}, of it compute {compute}, fill and drain {fill}." in said["ledger"]
    peak, activations = (f"{row[name] / 2**20:.2f}" for name in ("peak_memory_bytes", "activations_bytes"))
    assert f"peak {peak}, of it activations {activations}." in said["memory"]
    assert f"one point, {row['loss_first']:.4g} at step 1, {row['loss_last'] / 2:.4g} at step 2." in said["loss"]


def test_a_line_is_told_by_both_its_ends() -> None:
    rows = [row for m in (32, 4, 8) for row in table_rows(micro=m, bubble_fraction=1 / m, bubble_bound=None)]
    alternative = drawn(bubble_picture(rows)).alternative
    assert "K=2, M=4 to 32: measured 0.250 to 0.031, replayed 0.350 to 0.350." in alternative


def test_alternatives_stay_short_however_many_points_there_are() -> None:
    rows = [row for number in range(28) for row in table_rows(schedule=f"s{number}", micro=number % 7 + 1)]
    for picture in (bubble_picture, throughput_picture, ledger_picture, memory_picture, schedules_picture):
        alternative = drawn(picture(rows)).alternative
        assert len(alternative) < 3000
        assert re.search(r"And \d+ more\.$", alternative)


def test_the_bars_of_the_ledger_are_as_long_as_its_columns() -> None:
    lengths_s = dict(zip(PARTS, (5.0, 2.0, 0.0, -0.25, 0.5, 1.0, -0.5, 1.25), strict=True))
    [row] = table_rows(**{f"ledger_{part}": seconds for part, seconds in lengths_s.items()})
    drawn_bars = bars(drawn(ledger_picture([row])))
    assert [length for _, length in drawn_bars] == [seconds * 1e3 for seconds in lengths_s.values()]
    assert sum(length for _, length in drawn_bars) == row["step_s"] * 1e3


def test_parts_of_the_ledger_stand_end_to_end_and_negative_ones_left_of_zero() -> None:
    [row] = table_rows(ledger_imbalance_s=-0.25, ledger_overhead_s=0.75, ledger_jitter_s=-0.5)
    begins_and_lengths = dict(zip(PARTS, bars(drawn(ledger_picture([row]))), strict=True))
    assert begins_and_lengths["compute_s"] == (0, 6000)
    assert begins_and_lengths["fill_and_drain_s"] == (6000, 3000)
    assert begins_and_lengths["overhead_s"] == (9000, 750)
    assert begins_and_lengths["imbalance_s"] == (0, -250)
    assert begins_and_lengths["jitter_s"] == (-250, -500)
    [(where, _)] = lines(drawn(ledger_picture([row])), marker="|")
    assert where == [9000.0]  # the step


def test_parts_are_told_apart_without_colour() -> None:
    picture = drawn(ledger_picture(table_rows()))
    hatches = [bar.get_hatch() for bar in picture.figure.axes[0].patches]
    assert len(set(hatches)) == len(PARTS)
    assert {"compute", "fill and drain", "recompute", "jitter", "overhead and contention"} <= set(texts(picture))


def test_of_too_many_points_the_fastest_are_drawn_in_their_order() -> None:
    rows = [row for m in range(1, 71) for row in table_rows(micro=m, step_s=float(100 - m))]
    picture = drawn(ledger_picture(rows))
    assert bar_labels(picture) == [f"M={m}" for m in range(11, 71)]
    assert "the 60 fastest of 70 points" in subtitle(picture)
    assert len(picture.figure.axes) == 2  # columns


def test_a_long_name_leaves_room_for_the_bars() -> None:
    rows = [*table_rows(schedule="/very/long/path" * 20 + "/mine.csv"), *table_rows(micro=4)]
    assert max(map(len, bar_labels(drawn(ledger_picture(rows))))) < 60


def test_the_bound_is_a_curve_through_counts_that_were_not_run() -> None:
    rows = [row for m in (2, 8) for row in table_rows(micro=m, bubble_bound=1 / (m + 1))]
    [(counts, bound)] = lines(drawn(bubble_picture(rows)), linestyle=":")
    assert dict(zip(counts, bound, strict=True)) == pytest.approx({m: 1 / (m + 1) for m in range(2, 9)})


def test_a_bound_that_depends_on_measured_costs_is_known_where_they_were_measured() -> None:
    rows = [row for m in (2, 8) for row in table_rows(micro=m, bubble_bound=0.9 / (m + 1), recompute="always")]
    assert lines(drawn(bubble_picture(rows)), linestyle=":") == [([2, 8], [0.9 / 3, 0.9 / 9])]


def test_stages_are_the_axis_where_only_they_vary() -> None:
    rows = [row for k in (1, 2, 4) for row in table_rows(stages=k, bubble_bound=(k - 1) / (k + 1))]
    picture = drawn(bubble_picture(rows))
    assert picture.figure.axes[0].get_xlabel() == "stages K"
    assert lines(picture, linestyle="--") == [([1, 2, 4], [0.35] * 3)]
    [(counts, bound)] = lines(picture, linestyle=":")
    assert dict(zip(counts, bound, strict=True)) == pytest.approx({1: 0, 2: 1 / 3, 3: 2 / 4, 4: 3 / 5})


def test_oversubscribed_points_are_hollow_or_marked_and_explained() -> None:
    rows = [*table_rows(oversubscribed=True), *table_rows(micro=4)]
    picture = drawn(throughput_picture(rows))
    points = [line for line in picture.figure.axes[0].lines if line.get_marker() == "o"]
    assert [point.get_markerfacecolor() == PAPER for point in points] == [True, False]
    assert "oversubscribed" in texts(picture)
    for bar_picture in (ledger_picture, memory_picture):
        picture = drawn(bar_picture(rows))
        assert bar_labels(picture) == ["M=2 *", "M=4"]
        assert "* oversubscribed" in subtitle(picture)


def test_simulated_points_say_so() -> None:
    both = [*table_rows(status="simulated"), *table_rows(micro=4)]
    assert "simulated" in texts(drawn(throughput_picture(both[:1])))
    assert "measured or simulated" in texts(drawn(bubble_picture(both)))
    assert bar_labels(drawn(ledger_picture(both))) == ["M=2 simulated", "M=4"]
    compared = [*table_rows(status="simulated"), *table_rows(schedule="1f1b")]
    assert "gpipe simulated" in bar_labels(drawn(schedules_picture(compared)))


def test_memory_stands_by_recompute_setting_with_the_model_beside_it() -> None:
    settings = {"never": (4, 5), "always": (2, 1)}
    rows = [
        row
        for m in (2, 4)
        for setting, (activations, predicted) in settings.items()
        for row in table_rows(
            micro=m,
            recompute=setting,
            peak_memory_bytes=8 * 2**20,
            activations_bytes=activations * 2**20,
            activations_predicted_bytes=predicted * 2**20,
        )
    ]
    picture = drawn(memory_picture([rows[0], rows[2], rows[1], rows[3]]))
    assert bar_labels(picture) == ["M=2 never", "M=2 always", "M=4 never", "M=4 always"]
    assert bars(picture) == [(0, 4), (4, 4), (0, 2), (2, 6)] * 2
    assert [x for x, _ in lines(picture, marker="D")] == [[5], [1], [5], [1]]
    assert "M=4, recompute=always: peak 8.00, of it activations 2.00 (1.00 predicted)." in picture.alternative


def recomputed() -> list[Row]:
    settings = {"never": (200, 8, None), "layer": (300, 4, None), "budget": (250, 6, 5)}
    return [
        row
        for m in (2, 4)
        for setting, (step_ms, mebibytes, budget) in settings.items()
        for row in table_rows(
            micro=m,
            recompute=setting,
            recompute_budget=budget,
            step_s=step_ms / 1e3,
            peak_memory_bytes=(10 + mebibytes) * 2**20,
            activations_bytes=mebibytes * 2**20,
            activations_gpipe_bytes=(3 + 2 // m) * 2**20,
        )
    ]


def test_recompute_is_drawn_as_memory_against_time_beside_gpipes_curve() -> None:
    picture = drawn(recompute_picture(recomputed()))
    left, right = picture.figure.axes
    memory, activations = (
        [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines if len(line.get_xdata()) > 1]
        for axes in (left, right)
    )
    assert memory == [([200, 200], [18, 18]), ([300, 300], [14, 14]), ([250, 250], [16, 16])]
    assert activations[-1] == ([2, 4], [4, 3])
    assert {"never", "layer", "budget 5 MiB", "GPipe: O(N + (L/K)(N/M))"} <= set(texts(picture))
    assert "M=4, budget 5 MiB: 250.0 ms, peak 16.0, activations 6.00 (GPipe 3.00)." in picture.alternative


def test_one_setting_alone_has_no_picture_of_recompute() -> None:
    assert recompute_picture([row for row in recomputed() if row["recompute"] == "layer"]) is None


@pytest.fixture
def trained(tmp_path: Path) -> Content:
    """Two points of one training, one of another, and one that went wrong."""
    points = {OK: config(), ERROR: config(micro=1), "f" * 12: config(seed=1), WRONG: config(micro=4)}
    ok, other, seeded = (result(key, points[key]) for key in (OK, ERROR, "f" * 12))
    other.repeats[0].ranks[0].losses[:] = [2.0, 1.25, 1.5]
    other.repeats[0].ranks[1].losses.clear()
    wrong = result(WRONG, points[WRONG], status="wrong")
    write_sweep(tmp_path, points, [ok, other, seeded, wrong], ["micro", "seed"])
    return content_of(read_sweep(tmp_path))


def test_losses_share_a_panel_where_the_training_is_the_same(trained: Content) -> None:
    picture = drawn(loss_picture(trained.points))
    same, other = picture.figure.axes
    assert (same.get_title("left"), other.get_title("left")) == ("seed=0", "seed=1")
    assert [list(line.get_ydata()) for line in same.lines] == [[2.0, 1.25, 1.5], [2.0, 1.0]]  # M=1 below M=2
    assert [list(line.get_ydata()) for line in other.lines] == [[2.0, 1.0]]


def test_losses_say_how_far_apart_they_end(trained: Content) -> None:
    [alternative] = [picture.alternative for picture in pictures_of(trained) if picture.name == "loss"]
    assert "seed=0; 2 points, 2 at step 1, 1 to 1.25 at step 2; largest difference at step 2: 2.5e-01." in alternative
    assert "seed=1; one point, 2 at step 1, 1 at step 2." in alternative


def test_losses_that_are_no_numbers_are_a_result_error(trained: Content) -> None:
    broken = dataclasses.replace(trained.points[0], losses=["x"])
    with pytest.raises(ResultError, match="not a complete result"):
        pictures_of(dataclasses.replace(trained, points=(broken,)))


LONG = [3.0 - step / 100 for step in range(60)]


@pytest.fixture
def long(tmp_path: Path) -> Content:
    """Three points of one long training: the second equals the first, the third drifts by more and more."""
    points = {OK: config(schedule="gpipe"), ERROR: config(schedule="1f1b"), WRONG: config(schedule="naive")}
    results = [result(key, points[key]) for key in points]
    for each, drifting in zip(results, (0.0, 0.0, 2e-4), strict=True):
        each.repeats[0].ranks[0].losses[:] = [loss * (1 + drifting * (step > 30)) for step, loss in enumerate(LONG)]
    results[0].repeats[0].ranks[0].evaluations.append(Evaluation(60, 2.25, {}))
    write_sweep(tmp_path, points, results, ["schedule"])
    return content_of(read_sweep(tmp_path))


def test_a_long_training_shows_how_far_apart_losses_are_against_the_bound(long: Content) -> None:
    picture = drawn(drift_picture(long.points))
    above, below = picture.figure.axes
    assert [len(line.get_ydata()) for line in above.lines] == [60, 60, 60]
    bound, equal, drifting = (list(line.get_ydata()) for line in below.lines)
    assert bound == [largest_drift(step) for step in range(1, 61)]
    assert all(math.isnan(value) for value in equal)
    assert drifting[31:] == pytest.approx([2e-4] * 29)
    assert below.get_yscale() == "log"


def test_a_long_training_says_what_is_equal_and_what_leaves_the_bound(long: Content) -> None:
    [said] = [picture.alternative for picture in pictures_of(long) if picture.name == "drift"]
    assert "equal to the last bit in all 60 steps" in said
    assert "at most 2.0e-04 in 60 steps, above the bound from step 32" in said


def test_a_short_training_has_no_picture_of_its_drift(trained: Content) -> None:
    assert drift_picture(trained.points) is None


def test_an_evaluation_is_a_hollow_mark_and_told(long: Content) -> None:
    picture = drawn(loss_picture(long.points))
    [evaluated] = [line for line in picture.figure.axes[0].lines if line.get_linestyle() == ":"]
    assert (list(evaluated.get_xdata()), list(evaluated.get_ydata())) == ([60], [2.25])
    assert "2.25 in the last evaluation" in picture.alternative


def test_a_value_is_drawn_as_text_not_as_a_formula() -> None:
    rows = [*table_rows(schedule="$\\bad{$"), *table_rows(micro=4)]
    for picture in (bubble_picture, ledger_picture, memory_picture):
        assert b"$\\bad{$" in rendered(drawn(picture(rows)), "svg")


def contrast(colour: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", [PAPER, "#14171c"])
def test_colours_of_data_are_readable_on_light_and_dark_pages(page: str) -> None:
    assert min(contrast(colour, page) for colour in PALETTE) >= 3


@pytest.mark.parametrize("name", PICTURES)
def test_a_themed_picture_takes_its_colours_and_font_from_the_page(pictures: list[Picture], name: str) -> None:
    [picture] = [picture for picture in pictures if picture.name == name]
    svg = themed_svg(picture)
    assert svg.startswith("<svg ")
    assert not [colour for colour in (INK, MUTED, RULE, PAPER) if colour in svg]
    assert {f"var(--{colour})" for colour in ("ink", "muted", "rule")} <= set(re.findall(r"var\(--\w+\)", svg))
    assert "font-family" not in svg
    assert "<style" not in svg  # it would hold for the page
    root = ElementTree.fromstring(svg)
    assert {"width", "height"}.isdisjoint(root.attrib)
    assert (root.get("class"), root.get("role")) == ("figure", "img")
    width, height = picture.figure.get_size_inches() * 72
    assert [float(number) for number in root.get("viewBox", "").split()] == pytest.approx([0, 0, width, height])
    [background] = [element for element in root.iter() if element.get("id") == f"{name}-patch_1"]
    assert [path.get("style") for path in background] == ["fill: none"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_themed_picture_is_told_to_those_who_cannot_see_it(pictures: list[Picture], name: str) -> None:
    [picture] = [picture for picture in pictures if picture.name == name]
    root = ElementTree.fromstring(themed_svg(picture))
    named = {element.get("id"): element.text for element in root}
    described_by = root.get("aria-labelledby", "").split()
    assert [named[identifier] for identifier in described_by] == [picture.title, picture.alternative]


def test_themed_pictures_share_no_id_and_refer_to_their_own(pictures: list[Picture]) -> None:
    svgs = [themed_svg(picture) for picture in pictures]
    ids = [identifier for svg in svgs for identifier in re.findall(r'\bid="([^"]*)"', svg)]
    assert len(set(ids)) == len(ids)
    for svg in svgs:
        references = set(re.findall(r'(?:url\(|href=")#([^)"]*)', svg))
        assert references
        assert references <= set(re.findall(r'\bid="([^"]*)"', svg))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_files_give_the_same_bytes(reported: Path, pictures: list[Picture], suffix: str) -> None:
    rows = content_of(read_sweep(reported)).rows
    for again in (bubble_picture(rows), ledger_picture(rows)):
        [first] = [picture for picture in pictures if picture.name == drawn(again).name]
        assert rendered(first, suffix) == rendered(drawn(again), suffix)
        assert rendered(first, suffix).startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])


def test_a_pdf_brings_its_fonts_along(pictures: list[Picture]) -> None:
    assert b"/FontFile2" in rendered(pictures[0], "pdf")


def test_nothing_is_cut_off_at_the_edges() -> None:
    rows: list[Row] = []
    for stages in (2, 4, 8):
        for schedule in ("gpipe", "interleaved_with_a_long_name", "zb_h1"):
            rows += table_rows(stages=stages, schedule=schedule, micro=8, oversubscribed=True, recompute="except_last")
            rows += table_rows(stages=stages, schedule=schedule, micro=32)
    for draw in (bubble_picture, throughput_picture, ledger_picture, memory_picture, schedules_picture):
        figure = drawn(draw(rows)).figure
        inches = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert inches.x0 >= -0.01
        assert inches.y0 >= -0.01
        assert inches.x1 <= width + 0.01
        assert inches.y1 <= height + 0.01
