"""How long a group may take and be silent: generous before the first step, then by its steps."""

import pytest

from pipebench.harness import limits
from pipebench.harness.limits import Deadline, Limits

AUTO = Limits(None, None, num_steps=10)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: clock[0])
    return clock


@pytest.mark.parametrize(
    ("steps_s", "silence_s"),
    [((), 300), ((0.1,), 30), ((1.5,), 30), ((3.0, 2.0), 60), ((2.0, 3.0), 60), ((1000.0,), 1500)],
)
def test_silence_follows_the_slowest_step_and_is_never_half_an_hour(
    steps_s: tuple[float, ...], silence_s: float, now: list[float]
) -> None:
    deadline = Deadline(AUTO)
    for step_s in steps_s:
        deadline.hear(step_s)
    assert deadline.silence_s == silence_s
    assert deadline.remaining_s() == silence_s
    now[0] += silence_s + 1
    assert deadline.remaining_s() == -1
    assert deadline.missed() == f"no progress for {silence_s} s (progress_limit_s)"


def test_every_sign_of_life_starts_the_silence_anew(now: list[float]) -> None:
    deadline = Deadline(Limits(None, 5.0, num_steps=10))
    now[0] += 4
    deadline.hear(None)
    now[0] += 4
    assert deadline.remaining_s() == 1


def test_the_whole_time_follows_the_first_step(now: list[float]) -> None:
    deadline = Deadline(AUTO)
    deadline.hear(3.0)
    for _ in range(40):
        now[0] += 30.5
        deadline.hear(3.0)
    assert deadline.remaining_s() == 600 + 20 * 3.0 * 10 - 40 * 30.5
    assert deadline.remaining_s() < 0
    assert deadline.missed() == "not done after 1200 s (point_limit_s)"


def test_a_limit_that_is_given_holds_from_the_start(now: list[float]) -> None:
    deadline = Deadline(Limits(8.0, 60.0, num_steps=10))
    now[0] += 5
    assert deadline.remaining_s() == 3


def test_who_was_asleep_itself_starts_again(now: list[float]) -> None:
    deadline = Deadline(AUTO)
    now[0] += 5000
    deadline.start_again()
    assert deadline.remaining_s() == 300
