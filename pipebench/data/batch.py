"""The one type that data give and engines take."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Inputs and targets of one optimizer step, samples first."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: str) -> "MiniBatch":
        return MiniBatch(self.inputs.to(device), self.targets.to(device))
