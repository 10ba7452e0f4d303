"""`python -m pipebench.schedule`: what it prints, what it writes and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest

from pipebench.schedule.__main__ import main
from pipebench.schedule.builders import SCHEDULES
from pipebench.schedule.catalogue import build
from pipebench.schedule.text import load_csv

ONE_FORWARD_ONE_BACKWARD = """
    1f1b: 4 ranks, 4 stages, 4 micro-batches
    rank 0 |F0F1F2F3············B0B0··B1B1··B2B2··B3B3|
    rank 1 |··F0F1F2········B0B0F3B1B1··B2B2··B3B3····|
    rank 2 |····F0F1····B0B0F2B1B1F3B2B2··B3B3········|
    rank 3 |······F0B0B0F1B1B1F2B2B2F3B3B3············|
    makespan         21 s, longest rank's own span 21 s
    bubble fraction  0.4286, closed form 0.4286
    peak held        4 3 2 1 micro-batches by rank from F to B
    critical path    7 F, 7 B, 6 changes of rank, 0 s of waits
"""
ZB_H2 = """
    zb_h2: 2 ranks, 2 stages, 4 micro-batches
    rank 0 |F0F1F2I0W0F3I1W1I2W2I3W3··|
    rank 1 |··F0I0F1I1F2I2W0F3I3W1W2W3|
    makespan         13 s, longest rank's own span 12 s
    bubble fraction  0.0769, closed form 0.0769
    peak held        3 1 micro-batches by rank from F to I
                     3 3 micro-batches by rank from F to W
    critical path    5 F, 4 I, 4 W, 1 changes of rank, 0 s of waits
"""
INTERLEAVED = """
    interleaved: 2 ranks, 4 stages, 4 micro-batches
    rank 0 |F0F1f0f1F2··b0b0F3b1b1f2B0B0f3B1B1··b2b2··b3b3B2B2B3B3|
    rank 1 |··F0F1f0b0b0f1b1b1F2B0B0F3B1B1f2b2b2f3b3b3B2B2B3B3····|
    makespan         13.5 s, longest rank's own span 13.5 s
    bubble fraction  0.1111, closed form 0.1111
    peak held        2.5 1.5 micro-batches by rank from F to B
    critical path    9 F, 9 B, 2 changes of rank, 0 s of waits
"""


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return what the command prints, which must be all well."""
    assert main([str(argument) for argument in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return what the command says to an error."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("1f1b", 4, 4), ONE_FORWARD_ONE_BACKWARD),
        (("zb_h2", 2, 4), ZB_H2),
        (("interleaved", 2, 4), INTERLEAVED),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_schedule_is_drawn_and_summed_up(
    arguments: tuple[object, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, *arguments).strip() == dedent(expected).strip()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_can_be_drawn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, name, 3, 6).startswith(f"{name}: 3 ranks")


def test_costs_are_those_of_a_rank_and_two_of_them_halve_the_backward(capsys: pytest.CaptureFixture[str]) -> None:
    assert "makespan         44 s" in printed(capsys, "1f1b", 4, 8, "--costs", "1,3")
    assert "makespan         44 s" in printed(capsys, "1f1b", 4, 8, "--costs", "1,2,1")
    assert "makespan         38 s" in printed(capsys, "interleaved", 4, 8, "--costs", "1,3")


def test_a_closed_form_that_is_only_a_bound_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bubble fraction  0.2174, at least 0.1429" in printed(capsys, "interleaved", 2, 3)


def test_recompute_costs_a_forward_and_keeps_its_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "gpipe", 4, 4, "--recompute", "except_last")
    assert "makespan         24 s" in said
    assert "bubble fraction  0.3750, closed form 0.3750" in said
    assert "no closed form" in printed(capsys, "zb_h1", 4, 4, "--recompute", "always")


def test_transfers_lengthen_the_step_but_not_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "1f1b", 4, 4, "--transfer", 0.25)
    assert "closed form 0.4286 with free transfers" in said
    assert "10 changes of rank, 2.5 s of waits" in said
    assert "(times rounded to 1 s: --svg FILE draws them exactly)" in said


def test_several_schedules_are_compared_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    table = """
        schedule     stages  makespan_s  span_s  bubble  closed form  held F-I  held F-W
        1f1b              4          33      33  0.2727       0.2727         4         4
        interleaved      12          27      27  0.1111       0.1111         5         5
    """
    said = printed(capsys, "1f1b,interleaved", 4, 8, "--chunks", 3)
    assert said.endswith(dedent(table).lstrip("\n")), said


def test_a_picture_wider_than_the_terminal_is_left_to_svg(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "1f1b", 4, 100)
    assert "(the picture is 627 characters wide, the terminal 120: --svg FILE draws it)" in said
    assert "rank 0 |" not in said


def test_of_many_ranks_the_extremes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "1f1b", 40, 64)
    assert "at most 40 (rank 0), at least 1 (rank 39) micro-batches by rank from F to B" in said


def test_zb_auto_says_what_it_expects_and_what_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "zb_auto", 4, 8, "--limit", 7)
    assert "bubble fraction  0.1111, the fill alone 0.1111" in said
    assert "search           predicted 27 s within 7 micro-batches a rank; best hand-written zb_h" in said


def test_csv_comes_back_as_the_same_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    first = printed(capsys, "zb_h1", 3, 5, "--csv", path)
    assert first.endswith(f"wrote {path}\n")
    assert load_csv(path).rows == build("zb_h1", 3, 5).rows
    again = printed(capsys, path)
    assert again == printed(capsys, path, 3, 5)
    assert again.splitlines()[1:5] == first.splitlines()[1:5]  # the picture and the makespan
    assert "no closed form at these sizes and costs" in again


def test_a_csv_that_cannot_proceed_shows_the_failing_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    assert refused(capsys, path) == (
        f"ScheduleError: schedule {path} cannot proceed: rank 0 at 0B0 waits for 1B0, rank 1 at 1F1 waits for 0F1\n"
        "> rank 0 |  0F0 [0B0] 0F1  0B1 \n"
        "> rank 1 | [1F1] 1F0  1B0  1B1 \n"
    )


def test_a_picture_has_a_panel_for_each_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.svg"
    assert printed(capsys, "1f1b,zb_v", 2, 4, "--svg", path).endswith(f"wrote {path}\n")
    root = ElementTree.parse(path).getroot()
    actions = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("class") == "action"]
    assert len(actions) == build("1f1b", 2, 4).num_actions + build("zb_v", 2, 4).num_actions
    assert root.get("role") == "img"


def test_perfetto_gets_a_span_for_each_action(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    printed(capsys, "zb_h1", 2, 4, "--perfetto", path)
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == build("zb_h1", 2, 4).num_actions


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f2b", 2, 2), "ConfigError: schedule='1f2b': expected one of gpipe, "),
        (("1f1b", 0, 2), "ConfigError: 1f1b 0 2: expected K and M of at least 1"),
        (("1f1b",), "ConfigError: schedule='1f1b' without sizes: expected NAME K M, or a .csv file"),
        (("1f1b", 4), "ConfigError: schedule='1f1b' without sizes"),
        (("zb_auto",), "ConfigError: schedule='zb_auto' without sizes"),
        (("1f1b", 4, 4, "--chunks", 2), "ConfigError: chunks=2: expected 1 with schedule=1f1b"),
        (("1f1b,gpipe", 4, 4, "--chunks", 2), "ConfigError: chunks=2: expected 1 with schedule=1f1b"),
        (("zb_auto", 4, 4, "--chunks", 3), "ConfigError: --chunks 3: expected 1 or 2 with schedule=zb_auto"),
        (("zb_auto", 4, 4, "--limit", 0.5), "ConfigError: --limit 0.5: expected at least 1, one micro-batch at a time"),
        (("1f1b", 4, 4, "--limit", 4), "ConfigError: --limit with schedule=1f1b: expected zb_auto, the one that heeds"),
        (("1f1b", 4, 4, "--costs", "1"), "ConfigError: --costs 1: expected F,B or F,I,W in seconds above 0, such as"),
        (("1f1b", 4, 4, "--costs", "1,x"), "ConfigError: --costs 1,x: expected"),
        (("1f1b", 4, 4, "--costs", "1,2,3,4"), "ConfigError: --costs 1,2,3,4: expected"),
        (("1f1b", 4, 4, "--costs", "1,nan"), "ConfigError: --costs 1,nan: expected"),
        (("1f1b", 4, 4, "--costs", "0,2"), "ConfigError: --costs 0,2: expected"),
        (("1f1b", 4, 4, "--transfer", -1), "ConfigError: --transfer -1.0: expected seconds, at least 0"),
        (("1f1b", 4, 4, "--transfer", "nan"), "ConfigError: --transfer nan: expected seconds, at least 0"),
        (("1f1b,gpipe", 4, 4, "--csv", "x"), "ConfigError: --csv with 2 schedules: expected one"),
        (("missing.csv",), "ScheduleError: schedule missing.csv: cannot be read: "),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, *arguments)
    assert error.startswith(said), error
    assert error.count("\n") == 1


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["1f1b", "2", "2", "--csv", str(tmp_path / "nowhere" / "x.csv")]) == 2
    assert "expected a file that can be written" in capsys.readouterr().err


def test_a_picture_of_too_many_boxes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1f1b", "64", "512", "--svg", str(tmp_path / "big.svg")]) == 2
    assert "65536 actions: expected at most 50000" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_name_it_lists_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys)
    for name in [*SCHEDULES, "zb_auto"]:
        assert f"\n  {name} " in said
    with pytest.raises(SystemExit) as left:
        main(["-h"])
    assert left.value.code == 0
    assert capsys.readouterr().out == said


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "pipebench.schedule", "naive", "1", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "rank 0 |F0B0B0|" in ran.stdout
