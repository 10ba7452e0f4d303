"""Random inputs and a fixed random network's answers: something a model can learn, made on the spot."""

from collections.abc import Callable

import torch

from pipebench.config import MlpConfig, SyntheticConfig, UMlpConfig
from pipebench.data.batch import MiniBatch
from pipebench.seeds import Purpose, seed_of

_HIDDEN = 32

Learner = MlpConfig | UMlpConfig | SyntheticConfig


def teacher_batches(model: Learner, batch: int, seed: int) -> Callable[[int], MiniBatch]:
    """Return inputs [batch, inputs] with targets [batch, outputs], or class indices [batch]."""
    inputs, outputs, classify = _interface(model)
    generator = torch.Generator().manual_seed(seed_of(seed, Purpose.TEACHER))
    first = torch.randn(inputs, _HIDDEN, generator=generator) / inputs**0.5
    second = torch.randn(_HIDDEN, outputs, generator=generator) / _HIDDEN**0.5

    def mini_batch(step: int) -> MiniBatch:
        generator = torch.Generator().manual_seed(seed_of(seed, Purpose.DATA, step))
        x = torch.randn(batch, inputs, generator=generator)
        answers = torch.tanh(x @ first) @ second
        return MiniBatch(x, answers.argmax(1) if classify else answers)

    return mini_batch


def _interface(model: Learner) -> tuple[int, int, bool]:
    match model:
        case MlpConfig():
            return model.inputs, model.outputs, model.task == "classification"
        case UMlpConfig():
            return model.inputs, model.outputs, False
        case SyntheticConfig():
            return model.width, model.width, False
