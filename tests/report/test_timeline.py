"""A timeline as compact text: what comes out of it is what went in."""

import base64
import dataclasses
import json
import zlib
from itertools import accumulate
from typing import Any

import pytest
from hand_made import OK, REFERENCE, SPANS, config, one_device, rank_record, result

from pipebench.record import Repeat, RunResult
from pipebench.report import timeline
from pipebench.report.timeline import Timeline, packed, timeline_of


def unpacked(text: str) -> dict[str, Any]:
    content = json.loads(zlib.decompress(base64.b64decode(text)))
    assert isinstance(content, dict)
    return content


def spans(content: dict[str, Any], which: str) -> list[list[tuple[float, float]]]:
    """Return each rank's (start, end) in seconds."""
    unit_s = content["unit_s"]
    times = [[time * unit_s for time in accumulate(rank)] for rank in content[which]]
    return [list(zip(rank[::2], rank[1::2], strict=True)) for rank in times]


def of_two_ranks(second_step: list[list[tuple[float, float, float]]]) -> RunResult:
    """Return a point of three steps: 9 s, that of `second_step` (10 s), and 12 s."""
    late = [[(start + 3, end + 3, 0.0) for start, end, _ in rank] for rank in SPANS]
    steps = [SPANS, second_step, late]
    ranks = [
        dataclasses.replace(rank_record(rank, [], 9.0), step_s=[9.0, 10.0, 12.0], spans=[step[rank] for step in steps])
        for rank in range(2)
    ]
    return result(OK, config(steps=3), repeats=[Repeat(ranks, wall_s=40.0)])


def timeline_in(point: RunResult) -> Timeline:
    found = timeline_of(point)
    assert found is not None
    return found


def test_the_step_is_the_median_one_and_its_replay_has_its_costs() -> None:
    longer = [[(start, end, 0.0) for start, end, _ in rank] for rank in SPANS]
    longer[0][3] = (7.0, 10.0, 0.0)  # the last backward of rank 0 takes 3 s instead of 2 s: 2.5 s in the mean
    content = unpacked(packed({OK: timeline_in(of_two_ranks(longer))})[OK])
    assert spans(content, "step") == [
        [pytest.approx((start, end), abs=1e-6) for start, end, _ in rank] for rank in longer
    ]
    assert spans(content, "replayed")[0][2:4] == [pytest.approx((5.0, 7.5)), pytest.approx((7.5, 10.0))]


def test_times_survive_to_a_ten_millionth_of_the_step_and_roundings_do_not_add_up() -> None:
    third = 1 / 3
    ranks = [[(i * third, (i + 1) * third, 0.0) for i in range(4)] + [(4 * third, 4 * third, 0.0)] for _ in range(2)]
    repeat = Repeat([rank_record(rank, ranks[rank], 4 * third) for rank in range(2)], wall_s=9.0)
    content = unpacked(packed({OK: timeline_in(result(OK, config(), repeats=[repeat]))})[OK])
    for found, expected in zip(spans(content, "step"), ranks, strict=True):
        for (start, end), (start_s, end_s, _) in zip(found, expected, strict=True):
            assert start == pytest.approx(start_s, abs=4 * third * 1e-7)
            assert end == pytest.approx(end_s, abs=4 * third * 1e-7)


def test_the_rows_are_those_of_the_record() -> None:
    content = unpacked(packed({OK: timeline_in(result(OK, config()))})[OK])
    rows = [
        [
            f"{stage}{op}{'' if micro_batch < 0 else micro_batch}"
            for op, stage, micro_batch in zip(rank["ops"], rank["stages"], rank["micro_batches"], strict=True)
        ]
        for rank in content["ranks"]
    ]
    assert rows == result(OK, config()).rows
    assert set(content["colors"]) == {"F", "B", "O"}
    assert content["chunks"] == [0, 0]


def test_the_alternative_says_both_makespans_and_bubbles() -> None:
    assert timeline_in(result(OK, config())).alternative == (
        "Timeline of 2 ranks. Measured step: makespan 9000 ms, bubble 0.333. "
        "Replayed, each rank on a device of its own: makespan 9000 ms, bubble 0.333."
    )
    assert "Simulated step" in timeline_in(result(OK, config(), status="simulated")).alternative


def test_without_spans_there_is_no_timeline() -> None:
    ranks = [dataclasses.replace(rank_record(rank, [], 9.0), spans=[]) for rank in range(2)]
    assert timeline_of(result(OK, config(), repeats=[Repeat(ranks, wall_s=9.0)])) is None


def test_spans_that_never_end_are_refused() -> None:
    endless = [[(start, float("inf"), 0.0) for start, _, _ in rank] for rank in SPANS]
    ranks = [rank_record(rank, endless[rank], 9.0) for rank in range(2)]
    with pytest.raises(ValueError, match="finite times"):
        timeline_of(result(OK, config(), repeats=[Repeat(ranks, wall_s=9.0)]))


def test_the_largest_timelines_are_left_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    timelines = {"large": timeline_in(result(OK, config())), "small": timeline_in(one_device(REFERENCE))}
    sizes = {key: len(text) for key, text in packed(timelines).items()}
    assert list(sizes) == ["small", "large"]
    monkeypatch.setattr(timeline, "MOST_BYTES", sum(sizes.values()) - 1)
    assert list(packed(timelines)) == ["small"]
