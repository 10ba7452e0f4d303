"""What passes from layer to layer, and from data to the first and to the loss: a tensor, or a flat tuple of tensors.

Every tensor has the samples first. A layer gets what the layer before it returned as one argument, as in nn.Sequential.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def num_samples(value: Value) -> int:
    return len(tensors_of(value)[0])


def split(value: Value, sizes: Sequence[int]) -> Sequence[Value]:
    """Return pieces of so many samples each."""
    if isinstance(value, Tensor):
        return list(torch.split(value, list(sizes)))
    return list(zip(*(torch.split(tensor, list(sizes)) for tensor in value), strict=True))


def moved(value: Value, device: str) -> Value:
    return value.to(device) if isinstance(value, Tensor) else tuple(tensor.to(device) for tensor in value)


def is_value(made: object) -> bool:
    """Tell whether something that a user's code returned is a tensor or a flat tuple of tensors."""
    if isinstance(made, tuple):
        return bool(made) and all(isinstance(each, Tensor) for each in made)
    return isinstance(made, Tensor)


def told(made: object) -> str:
    """Return what something is, in a few words: shape and dtype of tensors, else its type."""
    if isinstance(made, Tensor):
        return f"{tuple(made.shape)} {str(made.dtype).removeprefix('torch.')}"
    if isinstance(made, tuple) and type(made) is tuple:
        return f"a tuple of {', '.join(map(told, made)) or 'nothing'}"
    return f"a {type(made).__name__}"
