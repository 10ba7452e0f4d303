"""Small models, and what plain PyTorch makes of them: a loop over micro-batches and layers, no engine.

Only the seeds are ours, for dropout is defined by them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipebench.config import MlpConfig, SyntheticConfig, TransformerConfig
from pipebench.data.batch import MiniBatch
from pipebench.models import layer_sequence
from pipebench.models.layers import LayerSequence, build_layers
from pipebench.seeds import Purpose, seed_of

SEED = 5
NUM_SAMPLES = 11

TRANSFORMER = TransformerConfig(
    name="tiny", layers=2, width=16, heads=2, feed_forward=32, vocabulary=256, sequence=6, dropout=0.2
)
MLP = MlpConfig(name="tiny", layers=3, width=16, inputs=8, outputs=4, task="regression", dropout=0.2)
CLASSIFIER = MlpConfig(name="tiny", layers=3, width=16, inputs=8, outputs=4, task="classification", dropout=0.2)
SYNTHETIC = SyntheticConfig(
    name="tiny", layers=8, width=8, forward_s=0.0, backward_s=0.0, weight_share=0.5, imbalance=0.0
)

Model = TransformerConfig | MlpConfig | SyntheticConfig
MODELS: dict[str, Model] = {"transformer": TRANSFORMER, "mlp": MLP, "classifier": CLASSIFIER, "synthetic": SYNTHETIC}


def sequence_of(model: Model | LayerSequence) -> LayerSequence:
    return model if isinstance(model, LayerSequence) else layer_sequence(model)


def build(model: Model | LayerSequence) -> tuple[list[nn.Module], Callable[[Any, Any], Tensor]]:
    """Return all layers with weights that depend on the seed alone, and the loss."""
    sequence = sequence_of(model)
    return build_layers(sequence, range(sequence.num_layers), SEED), sequence.loss


def mini_batch(model: Model, step: int = 0, num_samples: int = NUM_SAMPLES) -> MiniBatch:
    generator = torch.Generator().manual_seed(1000 + step)
    match model:
        case TransformerConfig():
            text = torch.randint(256, (num_samples, model.sequence + 1), generator=generator)
            return MiniBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        case MlpConfig(task="classification"):
            classes = torch.randint(model.outputs, (num_samples,), generator=generator)
            return MiniBatch(torch.randn(num_samples, model.inputs, generator=generator), classes)
        case MlpConfig():
            inputs, outputs = model.inputs, model.outputs
        case SyntheticConfig():
            inputs = outputs = model.width
    return MiniBatch(
        torch.randn(num_samples, inputs, generator=generator), torch.randn(num_samples, outputs, generator=generator)
    )


def plain_backward(
    layers: list[nn.Module],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batch: MiniBatch,
    num_micro_batches: int,
    step: int = 0,
    autocast: torch.dtype | None = None,
    factor: float = 1.0,
) -> float:
    """Add the gradients of the mini-batch's mean loss, times a factor, to `.grad` and return that loss."""
    num_samples = len(batch.inputs)
    total = 0.0
    micro_batches = zip(
        batch.inputs.tensor_split(num_micro_batches), batch.targets.tensor_split(num_micro_batches), strict=True
    )
    for micro_batch, (x, target) in enumerate(micro_batches):
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            for index, layer in enumerate(layers):
                torch.default_generator.manual_seed(seed_of(SEED, Purpose.DROPOUT, step, micro_batch, index))
                x = layer(x)
            loss = loss_of(x, target) * (len(target) / num_samples)
        (loss * factor).backward()
        total += float(loss.detach())
    return total


def gradients(layers: list[nn.Module]) -> dict[str, Tensor]:
    found = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, f"layer {index}: {name} has no gradient"
            found[f"{index}.{name}"] = parameter.grad.detach().clone()
    return found


def parameters(layers: list[nn.Module]) -> dict[str, Tensor]:
    return {f"{i}.{name}": p.detach().clone() for i, layer in enumerate(layers) for name, p in layer.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-5) -> None:
    """Compare each tensor as a whole: |a - b| / |b|, Euclidean norms."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        error = float((found[name].double() - tensor.double()).norm() / tensor.double().norm())
        assert error <= within, f"{name}: relative error {error}"


def assert_identical(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
