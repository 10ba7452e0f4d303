"""What an evaluation of a classifier tells besides its loss."""

from torch import Tensor

NOT_COUNTED = -100
"""The target that cross-entropy leaves out, such as that of padding (torch's `ignore_index`)."""


def accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the share of targets [...] with the highest of the scores [..., classes]."""
    counted = targets != NOT_COUNTED
    return ((scores.argmax(-1) == targets) & counted).sum() / counted.sum()
