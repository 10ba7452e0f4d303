"""What is said of a rank that hangs, and which of several failures is the cause."""

from pathlib import Path

import pytest

from pipebench.engine.whereabouts import Place, in_words, make_file, open_record, read_places, steps_in_words
from pipebench.errors import StageError
from pipebench.harness.failures import RankFailure, death_of, failure_of, first_cause, output_path
from pipebench.schedule.action import Action
from pipebench.schedule.catalogue import build

AT_1F0 = Place("measuring", Action.parse("1F0"), True, 5.0)
BETWEEN = Place("warming up", None, False, 5.0)


def test_a_record_says_what_its_rank_noted_last(tmp_path: Path) -> None:
    schedule = build("1f1b", 3, 4, 1)
    make_file(tmp_path / "file", 3)
    first, second = (open_record(tmp_path / "file", rank) for rank in range(2))
    first.enters("measuring")
    first.waits(int(schedule.rows[0].codes[3]))
    second.enters("a name far too long for the room that there is in a record")
    places = read_places(tmp_path / "file")
    assert (places[0].phase, places[0].action, places[0].runs) == ("measuring", schedule.rows[0][3], False)
    assert places[1].phase == "a name far too long for the room that there is i"
    assert places[2] == Place("", None, False, 0.0)
    first.runs(int(schedule.rows[0].codes[4]))
    assert read_places(tmp_path / "file")[0].action == schedule.rows[0][4]
    assert read_places(tmp_path / "file")[0].runs
    first.between()
    assert read_places(tmp_path / "file")[0].action is None
    first.enters("measuring", 812, 100_000)
    assert (read_places(tmp_path / "file")[0].done, read_places(tmp_path / "file")[0].total) == (812, 100_000)
    first.runs(int(schedule.rows[0].codes[4]))
    assert read_places(tmp_path / "file")[0].done == 812
    assert (read_places(tmp_path / "file")[1].done, read_places(tmp_path / "file")[1].total) == (0, 0)


@pytest.mark.parametrize(
    ("action", "runs", "words"),
    [
        ("1F0", False, "waits at 1F0 for 0F0 from rank 0 since 3 s"),
        ("1B2", False, "waits at 1B2 for 2B2 from rank 2 since 3 s"),
        ("2B3", True, "runs 2B3 since 3 s"),
    ],
)
def test_a_wait_names_what_it_waits_for_and_from_whom(action: str, runs: bool, words: str) -> None:
    place = Place("measuring", Action.parse(action), runs, 5.0)
    assert in_words(place, build("gpipe", 3, 4, 1), now_s=8.0) == words


def test_a_rank_between_steps_is_in_its_phase() -> None:
    assert in_words(BETWEEN, None, now_s=9.0) == "is warming up since 4 s"
    assert in_words(Place("", None, False, 0.0), None, now_s=9.0) == "is starting"


def test_a_rank_between_two_steps_says_so_and_the_one_least_far_says_how_many_are_done() -> None:
    places = [Place("measuring", None, False, 5.0, done, 100_000) for done in (813, 812)]
    assert in_words(places[0], None, now_s=5.2) == "is between two steps since 0 s"
    assert steps_in_words(places) == "measuring, 812 of 100000 steps done"
    assert steps_in_words([BETWEEN, AT_1F0]) == ""


def account(when_s: float, rank: int, by_peer: bool) -> RankFailure:
    return RankFailure(when_s, rank, "error", f"rank {rank} failed", "E", BETWEEN, by_peer)


def test_who_only_noticed_anothers_end_is_not_the_cause_although_it_spoke_first(tmp_path: Path) -> None:
    for rank in range(3):
        output_path(tmp_path, rank).write_text(f"{rank}\n" * 30)
    error = first_cause([account(1.0, 0, True), account(3.0, 2, False), account(2.0, 1, False)], tmp_path)
    assert str(error) == "rank 1 failed"
    assert (error.failure.rank, error.failure.output) == (1, ["1"] * 20)
    assert error.failure.others == ["rank 2 failed", "rank 0 failed"]


@pytest.mark.parametrize(
    ("original", "status"),
    [
        (ZeroDivisionError("division by zero"), "error"),
        (MemoryError("no more"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (OSError(12, "Cannot allocate memory"), "oom"),
        (ValueError("the user's own text: out of memory"), "error"),
    ],
)
def test_the_original_error_says_the_status(original: Exception, status: str) -> None:
    error = StageError(f"rank 1 failed at 1F0: {original}")
    error.__cause__ = original
    failure = failure_of(error, 1, AT_1F0, 2.0)
    assert failure.status == status
    assert failure.message == str(error)
    assert failure.exception.startswith(type(original).__name__)
    outside = failure_of(original, 1, BETWEEN, 2.0)
    assert outside.message == f"rank 1 failed while warming up: {failure.exception}"


@pytest.mark.parametrize(
    ("exit_code", "out_of_memory", "status", "message"),
    [
        (7, False, "crashed", "rank 1 died at 1F0, exit code 7"),
        (-11, True, "crashed", "rank 1 was killed at 1F0 by SIGSEGV"),
        (-9, False, "crashed", "rank 1 was killed at 1F0 by SIGKILL"),
        (-9, True, "oom", "rank 1 was killed at 1F0: the kernel had no memory left for it"),
    ],
)
def test_a_death_without_a_word_is_told_by_its_exit(
    exit_code: int, out_of_memory: bool, status: str, message: str
) -> None:
    failure = death_of(1, exit_code, out_of_memory, AT_1F0, 2.0)
    assert (failure.status, failure.message) == (status, message)
