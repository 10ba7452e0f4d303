"""Closed forms of makespan and bubble fraction, each with its source and what it assumes.

All assume equal stages and free transfers. A bubble fraction is idle / makespan; Megatron-LM prints idle / ideal
instead: (K-1)/M for GPipe. K ranks, M micro-batches, v stages a rank; f, i, w, b = i + w and r are what one
micro-batch costs a rank. "Own derivation" means: found here, and equal to simulation for every size and cost tried.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds that one micro-batch costs one rank, summed over its stages.

    `recompute_s` is the mean over micro-batches, those that are not recomputed counted with nothing.
    """

    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0
    recompute_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def are_units(self) -> bool:
        """Tell whether F, I and W cost the same and nothing is recomputed, as most published forms assume."""
        return self.forward_s == self.input_s == self.weight_s and not self.recompute_s


UNIT_COSTS = PassCosts()

ClosedForm = Callable[[int, int, int, PassCosts], float | None]
"""Makespan in seconds from (K, M, v, costs), or None where the form does not hold."""


def bubble_bound(
    name: str, num_ranks: int, num_micro_batches: int, chunks: int = 1, costs: PassCosts = UNIT_COSTS
) -> float | None:
    """Return the closed form of idle / makespan, or None where none is known: for other costs or sizes, or a file."""
    makespan_s = makespan_bound(name, num_ranks, num_micro_batches, chunks, costs)
    return None if makespan_s is None else 1.0 - num_micro_batches * costs.busy_s / makespan_s


def makespan_bound(
    name: str, num_ranks: int, num_micro_batches: int, chunks: int = 1, costs: PassCosts = UNIT_COSTS
) -> float | None:
    """Return the closed form of the makespan in seconds, or None where none is known; one rank alone never waits."""
    closed_form = MAKESPANS.get(name)
    if closed_form is not None and num_ranks == 1:
        return num_micro_batches * costs.busy_s
    return None if closed_form is None else closed_form(num_ranks, num_micro_batches, chunks, costs)


def _pipelined(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float:
    """M(f+b+r) + (K-1)(f+b), bubble (K-1)/(M+K-1) without recompute.

    Huang et al. 2019, section 2.3; for 1F1B Narayanan et al. 2021, section 2.2.1. With recompute: own derivation;
    it adds work to every rank but nothing to fill and drain, since it runs while the gradient is in flight.
    """
    return num_micro_batches * costs.busy_s + (num_ranks - 1) * (costs.forward_s + costs.backward_s)


def _one_at_a_time(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float:
    """M(K(f+b) + r), bubble (K-1)/K without recompute: one rank works at any moment.

    Own derivation; only the last rank's recompute is not hidden behind the work of others.
    """
    return num_micro_batches * (num_ranks * (costs.forward_s + costs.backward_s) + costs.recompute_s)


def _looped(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float | None:
    """M(f+b+r) + (K-1)(f+b)/v, bubble (K-1)/(vM+K-1) without recompute, where M >= K.

    Narayanan et al. 2021, section 2.2.2, assumes that K divides M: for M > K it does not divide, this is the least
    that `interleaved` takes, and for looped_bfs (Lamy-Poirier 2023) still exact. With fewer micro-batches
    than ranks, each further chunk waits for the micro-batches to come round (own derivation, without recompute).
    """
    missing = max(0, num_ranks - num_micro_batches)
    if missing and costs.recompute_s and chunks > 1:
        return None
    slots = num_ranks - 1 + (chunks - 1) * missing
    return num_micro_batches * costs.busy_s + slots * (costs.forward_s + costs.backward_s) / chunks


def _zb_h1(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float | None:
    """M(f+i+w) + (K-1)(f+i-w) where M >= K; (M+K-1)(f+i) + w where M < K.

    Qi et al. 2024, table 2 and appendix H, for w <= f, i; the maxima that make it exact for any costs are an own
    derivation. Without recompute.
    """
    f, i, w = costs.forward_s, costs.input_s, costs.weight_s
    if costs.recompute_s:
        return None
    if num_micro_batches < num_ranks:
        return (num_micro_batches + num_ranks - 1) * (f + i) + w + (num_micro_batches - 1) * max(0.0, w - f, w - i)
    return num_micro_batches * costs.busy_s + (num_ranks - 1) * max(f, i, f + i - w)


def _zb_h2(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float | None:
    """M(f+i+w) + (K-1)f where M >= 2K-1 and all cost the same: the fill, and no other idle time.

    Qi et al. 2024, section 2.3, by the longest stage span, which leaves the fill out. For other costs, and for fewer
    micro-batches at unit costs: own derivation. Without recompute.
    """
    f, i, w = costs.forward_s, costs.input_s, costs.weight_s
    if costs.recompute_s:
        return None
    if num_micro_batches >= 2 * num_ranks - 1:
        return num_micro_batches * costs.busy_s + (num_ranks - 1) * max(f, i - f, f + i - 2 * w)
    missing = num_ranks - 1 - num_micro_batches // 2
    return num_micro_batches * costs.busy_s + (num_ranks - 1 + missing) * f if costs.are_units else None


def _fill_alone(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float:
    """M(f+b+r) + (K-1)f/v: the last rank cannot begin before; no order of this placement takes less.

    Holds where stage s < K lies on rank s, as in all built-in schedules. Exact only for orders that idle no further.
    """
    return num_micro_batches * costs.busy_s + (num_ranks - 1) * costs.forward_s / chunks


def _zb_v(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float | None:
    """6M + K - 1 half units where M >= 2K and all cost the same (Qi et al. 2024, arXiv:2401.10241v1, section 6)."""
    return _half_units(num_ranks - 1, num_ranks, num_micro_batches, costs)


def _v_half(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float | None:
    """6M + 3K - 7 (K even, at least 4) or 6M + 3K - 4 (K odd, at least 3) half units where M >= 2K, all costs equal.

    Fitted to the greedy order published with Qi et al. 2024 (arXiv:2405.15362) for K = 3 to 6 and 8.
    """
    if num_ranks < 3:
        return None
    return _half_units(3 * num_ranks - (4 if num_ranks % 2 else 7), num_ranks, num_micro_batches, costs)


V_MIN_IDLE = {3: 5, 4: 11, 5: 15, 6: 17, 8: 27}
"""Idle half units of V-Min by number of ranks, counted on the order published with Qi et al. 2024."""


def _v_min(num_ranks: int, num_micro_batches: int, chunks: int, costs: PassCosts) -> float | None:
    """6M + `V_MIN_IDLE` half units where M >= 2K and all cost the same; None for K that are not tabulated.

    The two thirds of 1F1B's bubble that the paper gives (arXiv:2405.15362) are a limit for many ranks: 4(K-1) half
    units, which no tabulated K meets, so it stands in for none.
    """
    idle = V_MIN_IDLE.get(num_ranks)
    return None if idle is None else _half_units(idle, num_ranks, num_micro_batches, costs)


def _half_units(idle: int, num_ranks: int, num_micro_batches: int, costs: PassCosts) -> float | None:
    """Return the makespan with `idle` half units of idle time, for equal costs and M >= 2K."""
    if not costs.are_units or num_micro_batches < 2 * num_ranks:
        return None
    return num_micro_batches * costs.busy_s + idle * costs.forward_s / 2


MAKESPANS: dict[str, ClosedForm] = {
    "gpipe": _pipelined,
    "1f1b": _pipelined,
    "naive": _one_at_a_time,
    "interleaved": _looped,
    "looped_bfs": _looped,
    "zb_h1": _zb_h1,
    "zb_h2": _zb_h2,
    "zb_v": _zb_v,
    "v_half": _v_half,
    "v_min": _v_min,
    "zb_auto": _fill_alone,
}
"""Closed forms of the makespan by the name that users write."""
