"""What happened when: spans of a step, measured or simulated, in one type.

Metrics, pictures and explanations are functions of a `Trace`, so they work for both kinds. Times are kept in
arrays, so that a step of millions of actions fits; whoever looks at one sees `Span`s.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipebench.schedule.action import Action, Row, Rows


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


class Trace:
    """When the actions of one step ran. A simulated step begins at 0; a measured one when the ranks were released.

    `start_s`, `end_s` and `delay_s` hold a number for each action, the ranks' rows laid end to end.
    """

    __slots__ = ("delay_s", "end_s", "rows", "start_s")

    def __init__(
        self,
        rows: Rows,
        start_s: NDArray[np.float64],
        end_s: NDArray[np.float64],
        delay_s: NDArray[np.float64] | None = None,
    ) -> None:
        self.rows = rows
        self.start_s = start_s
        self.end_s = end_s
        self.delay_s = np.zeros(len(start_s)) if delay_s is None else delay_s

    @staticmethod
    def of(spans: Iterable[Span], num_ranks: int) -> "Trace":
        """Return the trace of these spans, each rank's in their order."""
        by_rank: list[list[Span]] = [[] for _ in range(num_ranks)]
        for span in spans:
            by_rank[span.rank].append(span)
        ordered = [span for rank_spans in by_rank for span in rank_spans]
        return Trace(
            tuple(Row(span.action for span in rank_spans) for rank_spans in by_rank),
            np.array([span.start_s for span in ordered], dtype=np.float64),
            np.array([span.end_s for span in ordered], dtype=np.float64),
            np.array([span.delay_s for span in ordered], dtype=np.float64),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, rank by rank in the order of the rows."""
        owners_and_actions = [(rank, action) for rank, row in enumerate(self.rows) for action in row]
        times = zip(self.start_s.tolist(), self.end_s.tolist(), self.delay_s.tolist(), strict=True)
        return tuple(Span(*who, *when) for who, when in zip(owners_and_actions, times, strict=True))

    @property
    def duration_s(self) -> NDArray[np.float64]:
        return self.end_s - self.start_s

    @property
    def makespan_s(self) -> float:
        """Seconds from the step's begin to the end of its last span."""
        return float(self.end_s.max(initial=0.0))

    @property
    def longest_stage_span_s(self) -> float:
        """Return the longest time from a rank's own first start to its own last end.

        It is what a step costs when the next one follows at once and nothing waits for all ranks
        (Qi et al. 2024, section 5.3), at most `makespan_s`.
        """
        bounds = np.cumsum([0, *map(len, self.rows)])
        return max(
            (
                float(self.end_s[first:end].max() - self.start_s[first:end].min())
                for first, end in pairwise(bounds)
                if end > first
            ),
            default=0.0,
        )
