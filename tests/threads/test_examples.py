"""The models in examples/, which were written for nobody's engine: gradients on K ranks are those of a plain loop."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import SEED, assert_close, assert_identical, gradients, parameters
from ranks import Point, run
from torch import Tensor, nn
from torch.nn import functional

from pipebench.config import CustomConfig
from pipebench.data.batch import MiniBatch
from pipebench.models import layer_sequence
from pipebench.models.layers import build_layers
from pipebench.schedule.builders import Recompute
from pipebench.seeds import Purpose, seed_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

NUM_SAMPLES, NUM_MICRO_BATCHES = 7, 3


@dataclass(frozen=True)
class Example:
    """A model and its data in examples/, and the sum that its loss is the mean of in plain PyTorch."""

    module: str
    data: str
    arguments: dict[str, Any]
    data_arguments: dict[str, Any]
    loss: str
    sum_of_losses: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], int]

    def num_layers(self) -> int:
        return len(self.plain_layers())

    def plain_layers(self) -> list[nn.Module]:
        torch.manual_seed(seed_of(SEED, Purpose.WEIGHTS))
        return list(getattr(importlib.import_module(self.module), self.module)(**self.arguments))

    def config(self) -> CustomConfig:
        target = f"{self.module}:{self.module}"
        return CustomConfig("custom", self.module, target, self.arguments, self.loss, self.num_layers())

    def batch(self, step: int, num_samples: int) -> MiniBatch:
        data = getattr(importlib.import_module(self.module), self.data)
        return MiniBatch(*data(step, num_samples, SEED, **self.data_arguments))


EXAMPLE = {
    "resnet": Example(
        "resnet", "stripes", {"width": 4, "blocks": 1}, {"size": 8}, "cross_entropy",
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
        len,
    ),
    "llama": Example(
        "llama", "sums", {"width": 16, "depth": 2, "hidden": 24}, {"digits": 2}, "next_token",
        lambda output, target: functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"
        ),
        lambda target: int((target != -100).sum()),
    ),
    "unet": Example(
        "unet", "noisy_discs", {"width": 8, "levels": 2}, {"size": 8}, "mean_squared_error",
        lambda output, target: functional.mse_loss(output, target, reduction="sum"),
        Tensor.numel,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def plain_loss(example: Example, layers: list[nn.Module], batch: MiniBatch) -> float:
    """Add gradients to `.grad`, micro-batch by micro-batch; what a Down layer leaves, the next Up layer takes."""
    assert isinstance(batch.inputs, Tensor)
    assert isinstance(batch.targets, Tensor)
    total = 0.0
    pieces = zip(
        batch.inputs.tensor_split(NUM_MICRO_BATCHES), batch.targets.tensor_split(NUM_MICRO_BATCHES), strict=True
    )
    for x, target in pieces:
        left: list[Tensor] = []
        for layer in layers:
            if type(layer).__name__ == "Down":
                x, skip = layer(x)
                left.append(skip)
            else:
                x = layer(x, left.pop()) if type(layer).__name__ == "Up" else layer(x)
        loss = example.sum_of_losses(x, target) / example.count(batch.targets)
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", Recompute.NEVER), ("1f1b", Recompute.ALWAYS)])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", list(EXAMPLE))
def test_an_example_has_the_gradients_of_a_plain_loop(
    name: str, num_stages: int, schedule: str, recompute: Recompute
) -> None:
    example = EXAMPLE[name]
    expected = example.plain_layers()
    loss = plain_loss(example, expected, example.batch(0, NUM_SAMPLES))
    point = Point(
        layer_sequence(example.config()), schedule, recompute, num_stages, NUM_MICRO_BATCHES, NUM_SAMPLES,
        data=example.batch,
    )  # fmt: skip
    outcome = run(point)
    assert outcome.losses == pytest.approx([loss])
    assert_close(gradients(outcome.layers), gradients(expected))


def test_a_rank_builds_its_layers_with_the_weights_they_have_in_the_whole() -> None:
    sequence = layer_sequence(EXAMPLE["resnet"].config())
    assert_identical(
        parameters(build_layers(sequence, [2, 3], SEED)),
        parameters(build_layers(sequence, range(sequence.num_layers), SEED)[2:4]),
    )


def test_in_the_sums_only_the_answers_count() -> None:
    batch = EXAMPLE["llama"].batch(0, 50)
    assert isinstance(batch.inputs, Tensor)
    assert isinstance(batch.targets, Tensor)
    words = importlib.import_module("llama").WORDS
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        text = "".join(words[token] for token in tokens).strip()
        question = text.partition("=")[0]
        a, b = question.split("+")
        assert "".join(words[target] for target in targets if target != -100) == f"{int(a) + int(b)} "
