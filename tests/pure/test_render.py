"""Pictures, compared with what a reader should see."""

import json
from textwrap import dedent
from xml.etree import ElementTree

import pytest

from pipebench.render import COLORS, WORDS, ascii_picture, ascii_width, chrome_trace, natural_unit_s, svg_picture
from pipebench.schedule.action import Action, Op, Schedule
from pipebench.schedule.builders import SCHEDULES, Recompute, with_optimizer, with_recompute
from pipebench.schedule.catalogue import build
from pipebench.schedule.simulate import simulate
from pipebench.trace import Span, Trace

SVG = "{http://www.w3.org/2000/svg}"

# Four stages, four micro-batches; a forward takes one column, a backward two, a recompute one.
GPIPE = """
    rank 0 |F0F1F2F3··················B3B3B2B2B1B1B0B0|
    rank 1 |··F0F1F2F3············B3B3B2B2B1B1B0B0····|
    rank 2 |····F0F1F2F3······B3B3B2B2B1B1B0B0········|
    rank 3 |······F0F1F2F3B3B3B2B2B1B1B0B0············|
"""
ONE_FORWARD_ONE_BACKWARD = """
    rank 0 |F0F1F2F3············B0B0··B1B1··B2B2··B3B3|
    rank 1 |··F0F1F2········B0B0F3B1B1··B2B2··B3B3····|
    rank 2 |····F0F1····B0B0F2B1B1F3B2B2··B3B3········|
    rank 3 |······F0B0B0F1B1B1F2B2B2F3B3B3············|
"""
NAIVE = """
    rank 0 |F0··················B0B0F1··················B1B1F2··················B2B2F3··················B3B3|
    rank 1 |··F0············B0B0······F1············B1B1······F2············B2B2······F3············B3B3····|
    rank 2 |····F0······B0B0············F1······B1B1············F2······B2B2············F3······B3B3········|
    rank 3 |······F0B0B0··················F1B1B1··················F2B2B2··················F3B3B3············|
"""
GPIPE_EXCEPT_LAST = """
    rank 0 |F0F1F2F3··················B3B3R2B2B2R1B1B1R0B0B0|
    rank 1 |··F0F1F2F3············B3B3R2B2B2R1B1B1R0B0B0····|
    rank 2 |····F0F1F2F3······B3B3R2B2B2R1B1B1R0B0B0········|
    rank 3 |······F0F1F2F3B3B3R2B2B2R1B1B1R0B0B0············|
"""
# A rank's second stage is in lower case; its chunks take half as long, so a column is half a unit.
INTERLEAVED = """
    rank 0 |F0F1f0f1F2··b0b0F3b1b1f2B0B0f3B1B1··b2b2··b3b3B2B2B3B3|
    rank 1 |··F0F1f0b0b0f1b1b1F2B0B0F3B1B1f2b2b2f3b3b3B2B2B3B3····|
"""
ZB_H1 = """
    rank 0 |F0F1F2····I0W0F3I1W1I2W2I3W3|
    rank 1 |··F0F1··I0F2I1W0F3I2W1I3W2W3|
    rank 2 |····F0I0F1I1F2I2W0F3I3W1W2W3|
"""
V_SHAPED = """
    rank 0 |F0F1··f0··f1i0w0R0I0W0i1w1··I1W1|
    rank 1 |··F0f0F1f1····i0I0w0W0··i1I1w1W1|
"""
THREE_CHUNKS = """
    rank 0 |F0aF1aF0bF1bF0cF1c······B1cB0cB1bB0bB1aB0a|
    rank 1 |···F0aF1aF0bF1bF0cF1cB1cB0cB1bB0bB1aB0a···|
"""


def unit_trace(name: str, num_ranks: int, num_micro_batches: int, recompute: Recompute = Recompute.NEVER) -> Trace:
    """Play a schedule in which a rank's F, I, W and R of a micro-batch take a second each."""
    schedule = with_recompute(build(name, num_ranks, num_micro_batches), recompute)
    part = num_ranks / schedule.num_stages
    seconds = {Op.BACKWARD: 2 * part} | {op: part for op in Op if op not in (Op.BACKWARD, Op.OPTIMIZER)}
    return simulate(
        schedule, {(stage, op): each for stage in range(schedule.num_stages) for op, each in seconds.items()}
    )


@pytest.mark.parametrize(
    ("name", "recompute", "picture"),
    [
        ("gpipe", Recompute.NEVER, GPIPE),
        ("1f1b", Recompute.NEVER, ONE_FORWARD_ONE_BACKWARD),
        ("naive", Recompute.NEVER, NAIVE),
        ("gpipe", Recompute.EXCEPT_LAST, GPIPE_EXCEPT_LAST),
    ],
    ids=["gpipe", "1f1b", "naive", "gpipe-except_last"],
)
def test_four_stages_and_four_micro_batches_look_so(name: str, recompute: Recompute, picture: str) -> None:
    drawn = ascii_picture(unit_trace(name, 4, 4, recompute))
    assert drawn == dedent(picture).strip(), drawn


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_micro_batches", "picture"),
    [("interleaved", 2, 4, INTERLEAVED), ("zb_h1", 3, 4, ZB_H1)],
)
def test_second_stages_and_split_backwards_look_so(
    name: str, num_ranks: int, num_micro_batches: int, picture: str
) -> None:
    trace = unit_trace(name, num_ranks, num_micro_batches)
    drawn = ascii_picture(trace)
    assert drawn == dedent(picture).strip(), drawn
    assert {ascii_width(trace)} == set(map(len, drawn.splitlines()))


def test_a_v_shaped_schedule_with_a_recompute_looks_so() -> None:
    rows = ["0F0 0F1 3F0 3F1 3I0 3W0 0R0 0I0 0W0 3I1 3W1 0I1 0W1", "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1"]
    schedule = Schedule("v", [[Action.parse(word) for word in row.split()] for row in rows])
    trace = simulate(schedule, {(stage, op): 0.5 for stage in range(4) for op in Op})
    assert ascii_picture(trace) == dedent(V_SHAPED).strip(), ascii_picture(trace)


def test_with_more_than_two_stages_on_a_rank_a_letter_names_the_chunk() -> None:
    schedule = build("looped_bfs", 2, 2, 3)
    trace = simulate(schedule, {(stage, op): 1.0 for stage in range(6) for op in (Op.FORWARD, Op.BACKWARD)})
    assert ascii_picture(trace) == dedent(THREE_CHUNKS).strip(), ascii_picture(trace)
    assert ascii_width(trace) == len(ascii_picture(trace).splitlines()[0])


@pytest.mark.parametrize(
    ("ends", "unit_s"),
    [((1.0, 3.0), 1.0), ((0.5, 2.0), 0.5), ((2.0, 5.0), 1.0), ((3.0, 7.0), 1.0), ((1.0, 2.37), 1.0)],
)
def test_a_column_is_the_largest_part_of_the_shortest_action_that_fits_all(
    ends: tuple[float, float], unit_s: float
) -> None:
    spans = [Span(0, Action.parse("0F0"), 0.0, ends[0]), Span(0, Action.parse("0B0"), ends[0], ends[1])]
    assert natural_unit_s(Trace.of(spans, num_ranks=1)) == pytest.approx(unit_s)


def test_a_trace_without_spans_is_an_empty_picture() -> None:
    assert ascii_picture(Trace.of([], num_ranks=2)) == "rank 0 ||\nrank 1 ||"


def test_a_column_is_as_wide_as_asked_and_the_optimizer_has_no_micro_batch() -> None:
    trace = Trace.of([Span(0, Action.parse("0F12"), 0.0, 0.5), Span(0, Action.parse("0O"), 0.75, 1.0)], num_ranks=1)
    assert ascii_picture(trace, unit_s=0.25) == "rank 0 |F2F2··OO|"


def test_perfetto_gets_a_process_for_each_rank_and_microseconds_on_one_clock() -> None:
    trace = Trace.of(
        [
            Span(0, Action.parse("0F1"), 0.0, 0.002, 0.0005),
            Span(1, Action.parse("1R1"), 0.002, 0.0035),
            Span(1, Action.parse("1O"), 0.004, 0.0045),
        ],
        num_ranks=2,
    )
    drawn = chrome_trace(trace)
    assert json.loads(json.dumps(drawn)) == drawn
    assert drawn["displayTimeUnit"] == "ms"
    assert drawn["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1"}},
        {
            "ph": "X", "name": "0F1", "cat": "forward", "pid": 0, "tid": 0, "ts": 0.0, "dur": 2000.0,
            "args": {"stage": 0, "micro_batch": 1, "delay_us": 500.0},
        },
        {
            "ph": "X", "name": "1R1", "cat": "recompute", "pid": 1, "tid": 0, "ts": 2000.0, "dur": 1500.0,
            "args": {"stage": 1, "micro_batch": 1, "delay_us": 0.0},
        },
        {
            "ph": "X", "name": "1O", "cat": "optimizer", "pid": 1, "tid": 0, "ts": 4000.0, "dur": 500.0,
            "args": {"stage": 1, "micro_batch": -1, "delay_us": 0.0},
        },
    ]  # fmt: skip


def test_perfetto_names_the_new_ops_and_their_stage() -> None:
    drawn = chrome_trace(unit_trace("zb_v", 2, 1))["traceEvents"]
    names = {(event["name"], event["cat"]) for event in drawn if event["ph"] == "X"}
    assert ("3I0", "input_gradient") in names
    assert ("3W0", "weight_gradient") in names


def boxes(picture: str, kind: str) -> list[ElementTree.Element]:
    return [box for box in ElementTree.fromstring(picture).iter(f"{SVG}rect") if box.get("class") == kind]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_picture_is_well_formed_and_has_a_box_for_each_action_and_a_lane_for_each_rank(name: str) -> None:
    schedule = with_optimizer(build(name, 3, 4))
    trace = simulate(schedule, {(stage, op): 0.5 for stage in range(schedule.num_stages) for op in Op})
    picture = svg_picture([(name, trace)])
    assert [box[0].text.partition(":")[0] for box in boxes(picture, "action") if box[0].text] == list(
        map(str, schedule)
    )
    assert len(boxes(picture, "lane")) == 3


def test_boxes_stand_where_their_time_is_on_one_scale_for_all_panels() -> None:
    traces = [unit_trace("1f1b", 2, 2), unit_trace("zb_h1", 2, 4)]
    picture = svg_picture([("short", traces[0]), ("long", traces[1])])
    widths = [float(box.get("width", 0)) for box in boxes(picture, "action")]
    seconds = [span.duration_s for trace in traces for span in trace.spans]
    assert len({round(width / each, 1) for width, each in zip(widths, seconds, strict=True)}) == 1
    lanes = [float(lane.get("width", 0)) for lane in boxes(picture, "lane")]
    assert lanes[0] / lanes[-1] == pytest.approx(traces[0].makespan_s / traces[1].makespan_s, rel=1e-3)


def test_a_picture_is_readable_without_eyes_and_without_a_mouse() -> None:
    root = ElementTree.fromstring(svg_picture([("a < b & c", unit_trace("gpipe", 2, 2))]))
    assert root.get("role") == "img"
    labels = {element.get("id", ""): element.text for element in root if element.get("id")}
    assert root.get("aria-labelledby") == " ".join(labels)
    assert labels["pipebench-desc"] == "a < b & c: 2 ranks, bubble 33.3%, makespan 9 s"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[:3] == ["a < b & c", "bubble 33.3%, makespan 9 s", "rank 0"]
    assert {"F forward", "B backward", "idle"} <= set(texts)
    assert "W weight gradient" not in texts


def test_a_rank_s_second_stage_is_lighter() -> None:
    colors: dict[str, set[str]] = {}
    for box in boxes(svg_picture([("zb_v", unit_trace("zb_v", 2, 2))]), "action"):
        tooltip = box[0].text or ""
        colors.setdefault(tooltip[:2], set()).add(box.get("fill", ""))
    assert all(len(shades) == 1 for shades in colors.values())
    assert colors["0F"] == colors["1F"] == {f"#{bytes(COLORS[Op.FORWARD]).hex()}"}
    (lighter,) = colors["2F"]
    assert sum(bytes.fromhex(lighter[1:])) > sum(COLORS[Op.FORWARD])
    assert len({shade for shades in colors.values() for shade in shades}) == 6


def test_numbers_that_do_not_fit_their_box_are_left_out() -> None:
    def numbers(num_micro_batches: int) -> int:
        root = ElementTree.fromstring(svg_picture([("gpipe", unit_trace("gpipe", 2, num_micro_batches))]))
        return sum(text.get("class") == "number" for text in root.iter(f"{SVG}text"))

    assert numbers(8) == 32
    assert numbers(400) == 0


def test_every_op_has_a_colour_and_a_word_and_no_picture_needs_a_panel() -> None:
    assert set(COLORS) == set(WORDS) == set(Op)
    ElementTree.fromstring(svg_picture([]))
    ElementTree.fromstring(svg_picture([("empty", Trace.of([], num_ranks=1))]))
