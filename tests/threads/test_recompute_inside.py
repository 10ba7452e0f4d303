"""Layers that run again inside their backward: the same gradients to the last bit, and less memory.

That nothing else changes, batch norm's statistics, auxiliary losses and skips, is held by the tests of what people
train with, which go through every setting.
"""

from dataclasses import replace

import pytest
import torch
from plain import MLP, SYNTHETIC, TRANSFORMER, Model, assert_close, assert_identical, build, gradients
from ranks import Point, run
from torch import Tensor, nn

from pipebench.config import TransformerConfig
from pipebench.engine.recompute import arrange
from pipebench.record import LayerRun
from pipebench.schedule.builders import Recompute

EXPLICIT = replace(TRANSFORMER, attention="explicit", dropout=0.0)
"""Without dropout: ranks on threads share one random generator, and scores that run again hold no lock."""


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "zb_v"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        (TRANSFORMER, Recompute.LAYER),
        (TRANSFORMER, Recompute.BUDGET),
        (MLP, Recompute.LAYER),
        (SYNTHETIC, Recompute.LAYER),
        (EXPLICIT, Recompute.SELECTIVE),
    ],
    ids=["transformer", "some layers", "mlp", "synthetic", "selective"],
)
def test_gradients_and_losses_are_those_without_recompute(
    name: str, num_ranks: int, model: Model, recompute: Recompute
) -> None:
    point = Point(model, name, num_stages=num_ranks)
    never, again = run(point), run(replace(point, recompute=recompute))
    assert_identical(gradients(again.layers), gradients(never.layers))
    assert again.losses == never.losses


def test_scores_that_run_again_draw_the_same_dropout() -> None:
    """One rank has the generator to itself."""
    point = Point(replace(EXPLICIT, dropout=0.2), num_stages=1)
    assert_identical(gradients(run(replace(point, recompute=Recompute.SELECTIVE)).layers), gradients(run(point).layers))


def test_attention_written_out_is_the_fused_kernels() -> None:
    fused, explicit = (build(replace(EXPLICIT, attention=attention))[0] for attention in ("fused", "explicit"))
    x = torch.randint(256, (3, EXPLICIT.sequence), generator=torch.Generator().manual_seed(1))
    outputs = []
    for layers in (fused, explicit):
        y: Tensor = nn.Sequential(*layers)(x)
        y.square().mean().backward()
        outputs.append(y)
    torch.testing.assert_close(*outputs)
    assert_close(gradients(explicit), gradients(fused))


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Return the storage of what autograd saves of a forward, weights left out."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x)
    for parameter in layer.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def test_selective_recompute_keeps_all_but_the_softmax_and_what_leads_to_it() -> None:
    config = TransformerConfig(
        name="tiny", layers=1, width=16, heads=2, feed_forward=32, vocabulary=256, sequence=32, dropout=0.0,
        attention="explicit",
    )  # fmt: skip
    attention, x = build(config)[0][1], torch.randn(3, 32, 16, requires_grad=True)
    before = saved_bytes(attention, x)
    arrange(attention, LayerRun.SELECTIVE)
    softmax_bytes = 3 * 2 * 32 * 32 * 4
    assert before - saved_bytes(attention, x) >= softmax_bytes
    arrange(attention, LayerRun.KEEP)
    assert saved_bytes(attention, x) == before
