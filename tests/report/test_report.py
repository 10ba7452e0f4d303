"""A report is made from files alone: numbers checked by hand, failures visible, nothing in a folder trusted."""

import csv
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hand_made import (
    ERROR,
    MIB,
    OK,
    PENDING,
    REFERENCE,
    WRITTEN,
    WRONG,
    config,
    csv_rows,
    result,
    schedule_rows,
    table_rows,
    timed,
    write_sweep,
)
from rich.console import Console

from pipebench.errors import ResultError
from pipebench.record import LayerProfile, write_json
from pipebench.report.__main__ import main
from pipebench.report.cells import NOTHING, digits, escape
from pipebench.report.sweep import read_sweep
from pipebench.report.table import csv_text, markdown
from pipebench.report.tables import comparisons, pivots
from pipebench.report.terminal import print_table, terminal_table
from pipebench.report.write import write_report


def test_csv_holds_the_numbers_worked_out_by_hand(reported: Path) -> None:
    row = csv_rows(reported)[0]
    expected = {
        "step_s": 9.0,
        "step_ci_low_s": 9.0,
        "step_ci_high_s": 9.0,
        "samples_per_s": 2.0,  # 18 samples in 9 s
        "speedup": 12 / 9,
        "bubble_fraction": 1 - 12 / 18,
        "bubble_replayed": 1 - 12 / 18,
        "bubble_bound": 1 / 3,
        "replayed_step_s": 9.0,
        "imbalance": 1.0,
        "peak_memory_bytes": 3 * MIB,  # rank 1: parameters, gradients and activations
        "activations_bytes": MIB,
        "peak_rss_bytes": 100 * MIB,
        "grad_rel_error": 1e-7,
    }
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
    assert row["tokens_per_s"] == row["activations_predicted_bytes"] == ""
    assert row["oversubscribed"] == "False"


def test_activations_are_those_of_the_largest_rank_beside_the_model_of_the_same_rank(tmp_path: Path) -> None:
    layers = LayerProfile(
        num_samples=9,
        names=["Sleep", "Sleep"],
        forward_s=[],
        backward_s=[],
        input_s=[],
        weight_s=[],
        parameter_bytes=[0, 0],
        saved_bytes=[1000, 20],
        put_off_bytes=[0, 0],
        input_bytes=[0, 7],
        saves_input=[True, True],
    )
    write_sweep(tmp_path, {OK: config()}, [result(OK, config(), profile=layers)], ["stages"])
    [row] = read_sweep(tmp_path).rows
    assert row["activations_bytes"] == MIB  # rank 1's: rank 0 holds none at its peak
    assert row["activations_predicted_bytes"] == 2 * (20 + 7)  # GPipe with two micro-batches


def test_every_point_asked_for_is_a_row_in_grid_order(reported: Path) -> None:
    table = csv_rows(reported)
    assert [row["key"] for row in table] == [OK, WRONG, ERROR, PENDING]
    assert [row["status"] for row in table] == ["ok", "wrong", "error", "pending"]
    assert [(row["stages"], row["micro"]) for row in table] == [("2", "2"), ("2", "4"), ("2", "8"), ("3", "2")]
    assert table[1]["speedup"] == ""  # a wrong point is fast at nothing
    assert table[3]["step_s"] == ""
    assert float(table[3]["bubble_bound"]) == pytest.approx(2 / 4)


def test_csv_defuses_formulas_and_keeps_numbers() -> None:
    row = {"a": "=1+1", "b": "@x", "c": -1.5, "d": None, "e": float("nan"), "f": "a,b", "g": "-0.3"}
    text = csv_text(row, [row.values()])
    assert text == "a,b,c,d,e,f,g\n'=1+1,'@x,-1.5,,nan,\"a,b\",-0.3\n"


def test_the_page_shows_failed_points_and_why(reported: Path) -> None:
    page = (reported / "report.md").read_text()
    assert "4 points: 1 ok, 1 wrong, 1 error, 1 pending." in page
    assert "- **wrong** K=2, M=4, schedule=gpipe: gradient error 0.5" in page
    assert "- **error** K=2, M=8, schedule=1f1b: rank 1 failed at 1F0: a &#124; b &#60;script&#62; second line" in page
    assert "- **pending** K=3, M=2, schedule=1f1b: not run yet" in page
    gpipe, one_f_one_b = page.split("### schedule=")[1:]
    assert re.search(r"K=2 +\| +1\.33 \| \*\*wrong\*\* \|", gpipe)
    assert re.search(rf"K=2 +\| +{NOTHING} \| +\*\*error\*\* \|", one_f_one_b)
    assert re.search(rf"K=3 +\| +\*\*pending\*\* \| +{NOTHING} \|", one_f_one_b)


def test_the_page_says_what_ran_where_and_compared_with_what(reported: Path) -> None:
    page = (reported / "report.md").read_text()
    assert page.startswith("# pipebench: hand&#124;made\n")
    assert "stages = 2 / 3; micro = 2 / 4 / 8; schedule = gpipe / 1f1b" in page
    assert "Test &#60;CPU&#62;" in page
    assert "4.0 GiB" in page
    assert "0.333 / 0.333 / 0.333" in page
    assert "on one device (K=1, M=1)" in page
    assert re.search(r"\| ok +\| +12000 \| +1\.50 \|", page)
    assert page.count("<details>") == page.count("</details>") == 2  # the two measured points
    assert re.search(r"\| 0 +\| +0 \| +1 \| +1000 \| +2000 \|", page)
    assert "K=2, M=2: measured 0.333, replayed 0.333, bound 0.333.](bubble.png)" in page


def noise_line(folder: Path) -> str:
    write_report(read_sweep(folder))
    [line] = [line for line in (folder / "report.md").read_text().splitlines() if line.startswith("**Noise floor.**")]
    return html.unescape(line.removeprefix("**Noise floor.** "))


def test_the_page_says_how_far_two_measurements_of_one_point_lie_apart(tmp_path: Path) -> None:
    points = {OK: config(), PENDING: config(micro=4)}
    write_sweep(tmp_path, points, [timed(OK, points[OK], [[1.0] * 3])], ["micro"], timed(OK, points[OK], [[1.03] * 3]))
    line = "K=2, M=2 measured twice: ratio 1.030 (95 %: 1.030 to 1.030); differences below 3.0 % mean nothing here."
    assert noise_line(tmp_path) == line
    assert line in (tmp_path / "report.html").read_text()


def test_the_page_says_so_when_no_noise_floor_was_measured(reported: Path, tmp_path: Path) -> None:
    assert "**Noise floor.** Not measured." in (reported / "report.md").read_text()
    point = config()
    failed = result(OK, point, status="error", message="rank 1 | gone", repeats=[], rows=[])
    write_sweep(tmp_path, {OK: point}, [result(OK, point)], ["micro"], failed)
    assert noise_line(tmp_path) == "Not known: K=2, M=2 measured twice, error: rank 1 | gone."
    write_sweep(tmp_path, {OK: point}, [failed], ["micro"], result(OK, point))
    assert noise_line(tmp_path) == "Not known: K=2, M=2 measured twice, error: rank 1 | gone."


def test_a_second_measurement_is_no_row(tmp_path: Path) -> None:
    point = config()
    write_sweep(tmp_path, {OK: point}, [result(OK, point)], ["micro"], result(OK, point))
    write_report(read_sweep(tmp_path))
    assert [row["key"] for row in csv_rows(tmp_path)] == [OK]


def test_marks_stand_in_every_table() -> None:
    tables = pivots(table_rows(oversubscribed=True, steady=False, status="unchecked"))
    assert [table.lines[0][1].text for table in tables if table.name == "speedup"] == ["1.50*~ unchecked"]
    assert all("&#42;&#126; unchecked" in markdown(table) for table in tables)


def test_no_temporary_file_is_left(reported: Path) -> None:
    assert not [path for path in reported.iterdir() if path.name.startswith(".")]


def test_a_sweep_without_a_measurement_has_a_page_and_no_pictures(tmp_path: Path) -> None:
    write_sweep(tmp_path, {PENDING: config()}, [], ["stages"])
    assert [path.name for path in write_report(read_sweep(tmp_path))] == ["results.csv", "report.md", "report.html"]
    page = (tmp_path / "report.md").read_text()
    assert "**pending**" in page
    assert "No such run has finished yet" in page
    assert ".png" not in page


def test_the_terminal_table_keeps_every_number_in_a_narrow_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    failed = table_rows(status="error", step_s=None, samples_per_s=None, speedup=None, grad_rel_error=None, micro=32)
    print_table([*table_rows(oversubscribed=True), *failed])
    shown = capsys.readouterr().out
    for number in ("9000 [8500, 9500]", "2.00", "1.50", "0.400/0.350/0.333", "3.00", "1.0e-07"):
        assert number in shown
    assert "…" not in shown
    assert "\x1b" not in shown
    assert "\n* oversubscribed" in shown
    assert max(len(line) for line in shown.splitlines()[:4]) <= 100


def test_failed_points_are_red() -> None:
    table = terminal_table([*table_rows(), *table_rows(status="wrong"), *table_rows(status="error")])
    assert [row.style for row in table.rows] == [None, "red", "red"]


@pytest.mark.parametrize("key", ["../../etc", "AAAAAAAAAAAA", "abc", "aaaaaaaaaaaa\n", "/bbbbbbbbbbb", 12, None])
def test_a_key_cannot_lead_out_of_the_folder(folder: Path, key: object, capsys: pytest.CaptureFixture[str]) -> None:
    state = json.loads((folder / "sweep.json").read_text())
    for place in (state["points"][0], state["references"][0]):
        kept, place["key"] = place["key"], key
        write_json(folder / "sweep.json", state)
        assert main([str(folder)]) == 2
        place["key"] = kept
        error = capsys.readouterr().err
        assert error.startswith("ResultError: ")
        assert error.count("\n") == 1
        assert "expected 12 hex digits" in error


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"format": 1}', '{"format": 2}', '{"format": 2, "swept": 3, "points": [], "references": []}'],
)
def test_a_broken_sweep_file_is_one_line_and_exit_code_2(
    folder: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sweep.json").write_text(content)
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ResultError: ")
    assert error.count("\n") == 1
    assert "sweep.json" in error


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 2}', "\x00\xff"])
def test_a_broken_result_is_a_row_that_says_so_and_the_others_stay(folder: Path, content: str) -> None:
    (folder / "runs" / OK / "result.json").write_text(content)
    assert main([str(folder), "--format", "md"]) == 0
    broken, wrong = csv_rows(folder)[:2]
    assert (broken["key"], broken["status"], broken["step_s"]) == (OK, "unreadable", "")
    assert "result.json: " in broken["message"]
    assert (wrong["status"], wrong["step_s"]) == ("wrong", "9.0")
    assert "**unreadable** K=2, M=2" in (folder / "report.md").read_text()


def test_a_broken_reference_costs_the_speed_ups_alone(folder: Path) -> None:
    (folder / "runs" / REFERENCE / "result.json").write_text("{")
    assert [row["status"] for row in read_sweep(folder).rows] == ["ok", "wrong", "error", "pending"]
    assert {row["speedup"] for row in read_sweep(folder).rows} == {None}
    assert main([str(folder), "--format", "md"]) == 0
    assert "unreadable: " in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", [["nonsense"], []]),
        ("key", WRONG),
        ("status", "<b>ok</b>"),
        ("repeats", [{"ranks": [], "wall_s": 1, "profiling_s": 0}]),
        ("config", {}),
        ("environment", "here"),
    ],
)
def test_a_result_that_makes_no_sense_is_unreadable(folder: Path, field: str, value: object) -> None:
    path = folder / "runs" / OK / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value, "sha256": None}))
    sweep = read_sweep(folder)
    assert [row["status"] for row in sweep.rows] == ["unreadable", "wrong", "error", "pending"]
    assert sweep.results[OK].status == "unreadable"
    assert "\n" not in sweep.rows[0]["message"]
    assert main([str(folder), "--format", "md,html"]) == 0


def test_a_swept_key_must_be_one_of_ours(folder: Path) -> None:
    state = json.loads((folder / "sweep.json").read_text())
    write_json(folder / "sweep.json", {**state, "swept": ["__class__"]})
    with pytest.raises(ResultError, match="swept key '__class__'"):
        read_sweep(folder)


def test_a_folder_that_is_none_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("ResultError: ")


def test_a_link_in_the_folder_is_replaced_not_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "precious"
    outside.write_text("kept")
    (folder / "report.md").symlink_to(outside)
    write_report(read_sweep(folder))
    assert outside.read_text() == "kept"
    assert not (folder / "report.md").is_symlink()


def test_the_report_needs_no_torch_and_touches_no_pyplot_figure(folder: Path) -> None:
    program = (
        "import sys; from pipebench.report.__main__ import main; assert 'pandas' not in sys.modules; "
        "code = main([sys.argv[1]]); assert 'torch' not in sys.modules; "
        "import matplotlib.pyplot as plt; assert not plt.get_fignums(); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(folder / name) for name in WRITTEN]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, NOTHING),
        (0, "0"),
        (1234.6, "1235"),
        (99.96, "100"),
        (12.34, "12.3"),
        (0.01234, "0.0123"),
        (-2.0, "-2.00"),
    ],
)
def test_digits_are_significant_and_plain(value: float | None, text: str) -> None:
    assert digits(value) == text


def test_text_stays_text() -> None:
    assert escape("a|b <i>&\n[x](y) *z* `c`") == ("a&#124;b &#60;i&#62;&amp; &#91;x&#93;(y) &#42;z&#42; &#96;c&#96;")
    assert escape("233.5 [231.7, 237.1]*~") == "233.5 [231.7, 237.1]*~"
    assert escape("[1](javascript:0) [2][3] [4]: x") == "&#91;1&#93;(javascript:0) &#91;2&#93;[3] &#91;4&#93;: x"
    assert escape("*~bold~*") == "&#42;&#126;bold&#126;*"


def test_schedules_stand_fastest_first_and_zero_bubble_beside_the_best_interleaving() -> None:
    [table] = comparisons(schedule_rows())
    assert table.title == "Schedules by step time, stages=2, micro=2"
    cells = [[cell.text for cell in line] for line in table.lines]
    assert [line[0] for line in cells] == ["zb_h1", "interleaved", "looped_bfs", "gpipe", "1f1b"]
    assert [line[3] for line in cells] == ["0.778", "0.889", "0.944", "1.000", "1.056"]
    assert cells[0][-2:] == ["8000 (interleaved, 2)", "0.875"]
    assert all(line[-2:] == [NOTHING, NOTHING] for line in cells[1:])


def test_schedules_of_other_sizes_and_failed_ones_are_not_compared() -> None:
    rows = schedule_rows()
    assert comparisons(table_rows()) == []
    assert len(comparisons([*rows, *table_rows(micro=4)])) == 1
    both_sizes = comparisons([*rows, *({**row, "micro": 4} for row in rows)])
    assert [table.title.partition(", ")[2] for table in both_sizes] == ["stages=2, micro=2", "stages=2, micro=4"]
    [table] = comparisons([*rows, *table_rows(schedule="zb_v", status="error", step_s=None)])
    assert "zb_v" not in [line[0].text for line in table.lines]


def test_a_simulated_point_says_so_in_every_table() -> None:
    rows = table_rows(status="simulated", grad_rel_error=None)
    assert all("simulated" in markdown(table) for table in pivots(rows))
    console = Console(width=200, record=True)
    with console.capture() as capture:
        console.print(terminal_table(rows))
    assert "simulated" in capture.get()


def test_the_ledger_of_every_measured_point_adds_up_to_its_step(reported: Path) -> None:
    with (reported / "results.csv").open() as file:
        for row in csv.DictReader(file):
            parts = [row[name] for name in row if name.startswith("ledger_")]
            assert len(parts) == 8
            if row["status"] in ("ok", "wrong"):
                assert sum(map(float, parts)) == pytest.approx(float(row["step_s"]))
            else:
                assert set(parts) == {""}
    page = (reported / "report.md").read_text()
    section = page[page.index("## Where the time went") : page.index("## How to read the bubble")]
    # K=2, M=2, forward 1 s, backward 2 s: 6 s of work, 3 s of fill and drain, nothing else.
    assert re.search(r"\| +9000 \| +6000\.0 \| +3000\.0 (\| +0\.0 ){6}\|", section)
    assert section.count("\n| 2 ") == 1, "a wrong point is no result"
    assert "3000.0 ms of 9000.0 ms beyond forward and backward: 3000.0 fill and drain." in section
