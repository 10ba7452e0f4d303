"""The one type that data give and engines take."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.values import Value, moved, num_samples, split


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Inputs and targets of one optimizer step, samples first."""

    inputs: Value
    targets: Value

    def __len__(self) -> int:
        """Return the number of samples."""
        return num_samples(self.inputs)

    def to(self, device: str) -> "MiniBatch":
        return MiniBatch(moved(self.inputs, device), moved(self.targets, device))

    def split(self, sizes: Sequence[int]) -> list["MiniBatch"]:
        """Return pieces of so many samples each."""
        pieces = zip(split(self.inputs, sizes), split(self.targets, sizes), strict=True)
        return [MiniBatch(inputs, targets) for inputs, targets in pieces]
