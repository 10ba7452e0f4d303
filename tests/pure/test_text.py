"""Schedules as CSV in PyTorch's form, and files that are none."""

from pathlib import Path

import pytest
from cases import NAMES, actions, make

from pipebench.errors import ConfigError, ScheduleError
from pipebench.schedule.builders import IN_ROWS, Recompute, with_optimizer
from pipebench.schedule.catalogue import build
from pipebench.schedule.text import load_csv, to_csv


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recompute", [Recompute.NEVER, *IN_ROWS], ids=lambda recompute: recompute.value)
def test_a_schedule_comes_back_as_it_was_written(name: str, recompute: Recompute, tmp_path: Path) -> None:
    schedule = make(name, 3, 4, recompute)
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(with_optimizer(schedule)))
    assert load_csv(path).rows == schedule.rows
    assert load_csv(path).name == str(path)
    assert build(str(path), 3, 4).rows == schedule.rows


def test_the_text_is_one_line_a_rank_and_one_cell_an_action() -> None:
    assert to_csv(make("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_idle_steps_blanks_and_empty_last_lines_are_no_actions(tmp_path: Path) -> None:
    # As torch.distributed.pipelining writes it: an empty cell for each step in which a rank has nothing to do.
    path = tmp_path / "torch.csv"
    path.write_text("0F0,0F1,,, 0I0,0I1 ,0W0,0W1\n,1F0,1B0,1F1,1B1\n\n\n")
    assert load_csv(path).rows == (tuple(actions("0F0 0F1 0I0 0I1 0W0 0W1")), tuple(actions("1F0 1B0 1F1 1B1")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a line of actions such as 0F0,0B0 for each rank"),
        ("0F0,0X0\n", "line 1, cell 2: action '0X0': expected stage, op and micro-batch such as 2F0, or 2O"),
        ("0F0,0B0\n1F0,hello\n", "line 2, cell 2: action 'hello': expected stage, op and micro-batch such as 2F0"),
        ("0F0,0B0,0O\n", "line 1, cell 3: 0O: expected F, B, I, W or R; the optimizer steps after"),
        ("0F0,0B0\n0F1,0B1\n", "0F1 stands on rank 1, but stage 0 belongs to rank 0"),
        ("0F99999999,0B0\n", "line 1, cell 1: action '0F99999999': expected stages and micro-batches below"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        load_csv(path)
    assert str(caught.value).startswith(f"schedule {path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.csv", binary):
        with pytest.raises(ScheduleError, match=r"cannot be read: ") as caught:
            load_csv(path)
        assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_first_action(tmp_path: Path) -> None:
    path = tmp_path / "spreadsheet.csv"
    path.write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert load_csv(path).rows == (tuple(actions("0F0 0B0")),)


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("0F0,1F0,1B0,0B0\n1F1,0F1,0B1,1B1\n", "  rank 0 |  0F0  1F0  1B0  0B0 \n> rank 1 | [1F1] 0F1  0B1  1B1 "),
        ("0F0,0B0\n2F0,2B0\n", "  rank 0 |  0F0  0B0 \n> rank 1 |  2F0  2B0 "),
    ],
)
def test_stages_that_are_doubled_or_missing_are_shown_in_the_grid(text: str, grid: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        load_csv(path)
    assert caught.value.grid == grid


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(make("gpipe", 2, 4)))
    with pytest.raises(ScheduleError) as caught:
        build(str(path), 2, 8)
    assert str(caught.value) == f"schedule {path}: has 2 ranks and 4 micro-batches: expected stages=2 and micro=8"


def test_rows_with_recomputes_of_their_own_take_no_others(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0R0,0B0\n")
    with pytest.raises(ScheduleError, match="has recomputes of its own: expected recompute=never"):
        make(str(path), 1, 1, Recompute.ALWAYS)
    assert make(str(path), 1, 1).rows == (tuple(actions("0F0 0R0 0B0")),)


def test_an_unknown_name_is_no_file() -> None:
    with pytest.raises(ConfigError, match=r"or a \.csv file"):
        build("schedule.txt", 1, 1)
