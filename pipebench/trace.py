"""What happened when: spans of a step, measured or simulated, in one type.

Metrics, pictures and explanations are functions of a `Trace`, so they work for both kinds.
"""

from dataclasses import dataclass

from pipebench.schedule.action import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, in seconds since the step began.

    `delay_s` is the part of it in which the rank was ready to run but had no core (0 when simulated).
    """

    rank: int
    action: Action
    start_s: float
    end_s: float
    delay_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one step. A simulated step begins at 0; a measured one when the ranks were released."""

    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def makespan_s(self) -> float:
        """Seconds from the step's begin to the end of its last span."""
        return max((span.end_s for span in self.spans), default=0.0)
