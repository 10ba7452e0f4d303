"""Zero-bubble schedules with one stage a rank: the backward is split, and weight gradients fill what would be idle."""

import numpy as np

from pipebench.schedule.action import Op, Row, Rows, encode
from pipebench.schedule.builders import schedule


@schedule("zb_h1")
def zb_h1(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """1F1B's memory, about a third of its bubble (Qi et al. 2024, section 2.3, fig. 3 top)."""
    return tuple(_handcrafted(rank, num_micro_batches, num_ranks - rank, rank) for rank in range(num_ranks))


@schedule("zb_h2")
def zb_h2(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """No bubble but the fill, for about twice 1F1B's memory (Qi et al. 2024, section 2.3, fig. 3 bottom)."""
    return tuple(
        _handcrafted(rank, num_micro_batches, 2 * (num_ranks - rank) - 1, 2 * rank) for rank in range(num_ranks)
    )


def _handcrafted(stage: int, num_micro_batches: int, num_warm_up: int, lag: int) -> Row:
    """Return `num_warm_up` forwards, rounds of I, the W of `lag` micro-batches ago and the next F, and the W left.

    Each action gets the place it would have if no round lacked anything, and the order follows from that.
    """
    m = np.arange(num_micro_batches)
    place = np.concatenate([3 * (m - num_warm_up) + 2, 3 * m, 3 * (m + lag) + 1])
    codes = np.concatenate([encode(op, stage, m) for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)])
    return Row.of(codes[np.argsort(place, kind="stable")])
