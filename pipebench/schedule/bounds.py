"""Closed forms of the bubble fraction (idle / makespan), each with its source and what it assumes.

All assume equal stages and free transfers. Megatron-LM prints idle / ideal instead: (K-1)/M for GPipe.
"""

from collections.abc import Callable


def pipelined(num_stages: int, num_micro_batches: int) -> float:
    """(K-1)/(M+K-1) (Huang et al. 2019, section 2.3; the same for 1F1B, Narayanan et al. 2021, section 2.2.1)."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def one_at_a_time(num_stages: int, num_micro_batches: int) -> float:
    """(K-1)/K: one stage works at any moment, whatever M."""
    return (num_stages - 1) / num_stages


BUBBLE_BOUNDS: dict[str, Callable[[int, int], float]] = {
    "gpipe": pipelined,
    "1f1b": pipelined,
    "naive": one_at_a_time,
}


def gpipe_with_recompute(
    num_stages: int,
    num_micro_batches: int,
    num_recomputed: int,
    forward_s: float,
    backward_s: float,
    recompute_s: float,
) -> float:
    """Bubble of GPipe whose recompute runs while the gradient is in flight.

    (K-1)(f+b) / ((M+K-1)(f+b) + R r) for R recomputed micro-batches: recompute adds work to every stage
    but none to the fill and drain (own derivation; agrees with simulation for every setting and cost tried).
    """
    fill_and_drain = (num_stages - 1) * (forward_s + backward_s)
    useful = num_micro_batches * (forward_s + backward_s) + num_recomputed * recompute_s
    return fill_and_drain / (useful + fill_and_drain)
