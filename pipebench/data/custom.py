"""A user's own mini-batches: what their function makes of a step."""

from collections.abc import Callable

from pipebench.config import CustomDataConfig
from pipebench.data.batch import MiniBatch
from pipebench.errors import ConfigError
from pipebench.target import call, check_unedited
from pipebench.values import is_value, tensors_of, told


def custom_batches(config: CustomDataConfig, batch: int, seed: int) -> Callable[[int], MiniBatch]:
    """Return the function from a step to its mini-batch; it raises ConfigError where theirs returns another thing."""
    target = config.target
    assert target is not None
    check_unedited("data.target", target, config.source)

    def mini_batch(step: int) -> MiniBatch:
        made = call("data", target, (step, batch, seed), config.arguments)
        if not isinstance(made, (tuple, list)) or len(made) != 2 or not all(map(is_value, made)):
            found = told(tuple(made) if isinstance(made, list) else made)
            raise ConfigError(
                f"data.target={target}: returned {found}: "
                "expected (inputs, targets), each a tensor or a tuple of tensors"
            )
        for what, value in zip(("inputs", "targets"), made, strict=True):
            if any(tensor.dim() == 0 or len(tensor) != batch for tensor in tensors_of(value)):
                raise ConfigError(
                    f"data.target={target}: {what} are {told(value)}: expected batch={batch} samples first"
                )
        return MiniBatch(*made)

    return mini_batch
