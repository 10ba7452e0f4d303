"""Pictures, compared with what a reader should see."""

import json
from textwrap import dedent

import pytest
from cases import UNIT, make

from pipebench.render import ascii_picture, chrome_trace
from pipebench.schedule.action import Action
from pipebench.schedule.builders import Recompute
from pipebench.schedule.simulate import simulate
from pipebench.trace import Span, Trace

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
    drawn = ascii_picture(simulate(make(name, 4, 4, recompute), UNIT))
    assert drawn == dedent(picture).strip(), drawn


def test_a_column_is_as_wide_as_asked_and_the_optimizer_has_no_micro_batch() -> None:
    trace = Trace(
        (Span(0, Action.parse("0F12"), 0.0, 0.5), Span(0, Action.parse("0O"), 0.75, 1.0)),
        num_ranks=1,
    )
    assert ascii_picture(trace, unit_s=0.25) == "rank 0 |F2F2··OO|"


def test_perfetto_gets_a_process_for_each_rank_and_microseconds_on_one_clock() -> None:
    trace = Trace(
        (
            Span(0, Action.parse("0F1"), 0.0, 0.002, 0.0005),
            Span(1, Action.parse("1R1"), 0.002, 0.0035),
            Span(1, Action.parse("1O"), 0.004, 0.0045),
        ),
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
