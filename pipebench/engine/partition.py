"""Cut a sequence of layers into K contiguous stages."""

from collections.abc import Callable, Sequence
from itertools import accumulate


def split_uniformly(num_layers: int, num_stages: int) -> list[int]:
    """Return layer counts that differ by at most one, the longer stages first."""
    short, longer = divmod(num_layers, num_stages)
    return [short + (stage < longer) for stage in range(num_stages)]


def split_by_cost(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the layer counts whose most expensive stage is as cheap as any contiguous split allows.

    Exact, by dynamic programming; among the splits with the smallest maximum, the one with the smallest sum
    of squares, so that the other stages are even too. Needs at least one layer per stage.
    """
    prefix = [0.0, *accumulate(costs)]

    def stage_cost(start: int, end: int) -> float:
        return prefix[end] - prefix[start]

    bottleneck, _ = _best_split(len(costs), num_stages, stage_cost, max)
    limit = bottleneck * (1 + 1e-9)  # sums in another order differ in the last bits

    def squared_within_limit(start: int, end: int) -> float:
        cost = stage_cost(start, end)
        return cost * cost if cost <= limit else float("inf")

    _, counts = _best_split(len(costs), num_stages, squared_within_limit, lambda total, new: total + new)
    return counts


def _best_split(
    num_layers: int,
    num_stages: int,
    stage_cost: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Return the smallest joined cost of a split, and its layer counts.

    `best[end]` is the optimum for the first `end` layers and the stages so far; one more stage is
    added in each round.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, num_stages + 1):
        longest = num_layers - (num_stages - stage)
        best = {
            end: min(
                (join(cost, stage_cost(start, end)), [*counts, end - start])
                for start, (cost, counts) in best.items()
                if start < end
            )
            for end in range(stage, longest + 1)
        }
    return best[num_layers]
