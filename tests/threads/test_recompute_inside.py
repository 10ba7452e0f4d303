"""Layers that run again inside their backward: the same gradients to the last bit, whatever a layer is made of."""

from dataclasses import replace

import pytest
import torch
from plain import (
    MLP,
    SYNTHETIC,
    TRANSFORMER,
    Model,
    assert_identical,
    gradients,
)
from ranks import Point, run

from pipebench.record import LayerRun

AGAIN, KEEP, SELECTIVE = LayerRun.AGAIN, LayerRun.KEEP, LayerRun.SELECTIVE
CPU = torch.device("cpu")
EXPLICIT = replace(TRANSFORMER, attention="explicit", dropout=0.0)
"""Without dropout: ranks on threads share one random generator, and a second forward inside a layer holds no lock."""


def num_layers(model: Model) -> int:
    return model.num_layers


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "runs"),
    [
        (TRANSFORMER, (AGAIN,) * 6),
        (TRANSFORMER, (KEEP, AGAIN, KEEP, AGAIN, KEEP, KEEP)),
        (MLP, (AGAIN,) * 5),
        (SYNTHETIC, (AGAIN,) * 8),
        (EXPLICIT, (SELECTIVE,) * 6),
    ],
    ids=["transformer", "some layers", "mlp", "synthetic", "selective"],
)
def test_gradients_are_those_without_recompute(
    name: str, num_ranks: int, model: Model, runs: tuple[LayerRun, ...]
) -> None:
    if name == "zb_v" and (2 * num_ranks > num_layers(model) or num_ranks == 1):
        return
    point = Point(model, name, num_stages=num_ranks)
    never, again = run(point), run(replace(point, runs=runs))
    assert_identical(gradients(again.layers), gradients(never.layers))
    assert again.losses == never.losses
