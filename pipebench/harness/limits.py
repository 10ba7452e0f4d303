"""How long a group of workers may take, and how long it may be silent.

The longest step is not known before the first, so the automatic limits wait generously for that one and follow the
steps from then on. A step is collective, so one rank that hangs makes rank 0 silent too.
"""

import math
import time
from dataclasses import dataclass

FIRST_SIGN_S = 300.0
"""Longest silence before the first step: importing, gradients of the whole model on one process, profiling."""

LEAST_SILENCE_S = 30.0
MOST_SILENCE_S = 1500.0
STEPS_OF_SILENCE = 20
"""A group is taken for hung when it is silent for as long as this many of its slowest steps."""

LEAST_POINT_S = 600.0
ASLEEP_S = 5.0
"""Who finds a deadline missed by more was not running itself (Ctrl-Z, a suspended machine), and the group neither."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds for a whole group and for its silence, None where the steps decide; `num_steps` are all it will train."""

    point_s: float | None
    progress_s: float | None
    num_steps: int


class Deadline:
    """When patience with one group ends."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slowest_step_s: float | None = None
        self._first_step_s: float | None = None
        self.start_again()

    def start_again(self) -> None:
        self._began = self._heard = time.monotonic()

    def hear(self, step_s: float | None) -> None:
        """Note a sign of life, and the step's seconds if it is about one."""
        self._heard = time.monotonic()
        if step_s is not None:
            self._first_step_s = self._first_step_s or step_s
            self._slowest_step_s = max(step_s, self._slowest_step_s or 0.0)

    @property
    def silence_s(self) -> float:
        """Return the longest silence that is allowed now."""
        if self._limits.progress_s is not None:
            return self._limits.progress_s
        if self._slowest_step_s is None:
            return FIRST_SIGN_S
        return min(MOST_SILENCE_S, max(LEAST_SILENCE_S, STEPS_OF_SILENCE * self._slowest_step_s))

    @property
    def point_s(self) -> float:
        """Return the longest time that is allowed in all; endless while no step is known, since silence has its own."""
        if self._limits.point_s is not None:
            return self._limits.point_s
        if self._first_step_s is None:
            return math.inf
        return LEAST_POINT_S + STEPS_OF_SILENCE * self._first_step_s * self._limits.num_steps

    def remaining_s(self) -> float:
        """Return the seconds until either limit; below 0 when one has passed."""
        return min(self._heard + self.silence_s, self._began + self.point_s) - time.monotonic()

    def missed(self) -> str:
        """Say which limit has passed."""
        if self._heard + self.silence_s < self._began + self.point_s:
            return f"no progress for {self.silence_s:.0f} s (progress_limit_s)"
        return f"not done after {self.point_s:.0f} s (point_limit_s)"
