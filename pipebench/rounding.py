"""How far apart two runs of one training may drift by rounding alone.

Where two runs compute the same in another order, their first steps differ by a few unit roundoffs u of fp32, and
training is chaotic: what differs differs more by a constant factor a step later, until the two losses have no more in
common than the noise of their mini-batches. FIRST and GROWTH bound what was measured of the default transformer with
dropout and AdamW (experiments/LOG.md): a run that adds the micro-batches' gradients up in reverse order, and one whose
weights begin one unit in the last place away, up or down by chance.
"""

import math

UNIT_ROUNDOFF = 2.0**-24
"""Of fp32: the largest relative error of one rounding."""

FIRST = 8.0
"""Roundoffs by which losses may differ at the beginning."""

GROWTH = 0.1
"""Share by which a difference may grow in a step."""

MOST = 0.05
"""Relative difference beyond which growth tells nothing: mini-batches differ by as much."""


def largest_drift(step: int) -> float:
    """Return the most that two runs' losses of training step `step`, the first being 1, may differ by, relatively."""
    return min(MOST, FIRST * UNIT_ROUNDOFF * math.exp(GROWTH * step))
