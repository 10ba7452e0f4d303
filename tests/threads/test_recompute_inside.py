"""Layers that run again inside their backward: the same gradients to the last bit, and less memory.

That nothing else changes, batch norm's statistics, auxiliary losses and skips, is held by the tests of what people
train with, which go through every setting.
"""

from dataclasses import replace

import pytest
import torch
from plain import MLP, SEED, SYNTHETIC, TRANSFORMER, Model, assert_close, assert_identical, build, gradients
from ranks import CPU, Point, run
from torch import Tensor, nn

from pipebench.config import TransformerConfig
from pipebench.data.batch import MiniBatch
from pipebench.engine.recompute import arrange
from pipebench.engine.stage import Stage
from pipebench.linear import Linear
from pipebench.models.layers import LayerSequence, one_by_one
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


def users_block() -> nn.Module:
    """What a user writes: plain layers, of which one changes what came in its place."""
    return nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(inplace=True), nn.Linear(6, 6))


USERS = LayerSequence(7, one_by_one([*[users_block] * 3, nn.Identity, *[users_block] * 3]), nn.functional.mse_loss)


def numbers(step: int, num_samples: int) -> MiniBatch:
    x = torch.randn(2, num_samples, 6, generator=torch.Generator().manual_seed(step))
    return MiniBatch(x[0], x[1])


@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 7), ("zb_h1", 1), ("zb_h1", 7), ("zb_v", 2)])
@pytest.mark.parametrize("recompute", list(Recompute))
def test_layers_of_users_that_work_in_place_or_do_nothing_run_on_every_schedule(
    name: str, recompute: Recompute, num_ranks: int
) -> None:
    """On seven ranks one stage hands on what it was given."""
    layers, loss_of = build(USERS)
    for piece in numbers(0, 11).split([4, 4, 3]):
        x = piece.inputs
        for layer in layers:
            x = layer(x)
        (loss_of(x, piece.targets) * (len(piece) / 11)).backward()
    trained = [layer for layer in layers if list(layer.parameters())]
    outcome = run(Point(USERS, name, recompute, num_ranks, data=numbers))
    assert_close(gradients([layer for layer in outcome.layers if list(layer.parameters())]), gradients(trained))


@pytest.mark.parametrize("linear", [nn.Linear, Linear])
def test_a_linear_layer_that_runs_again_is_told_so_be_it_ours_or_plain(linear: type[nn.Linear]) -> None:
    """Otherwise what it puts off would hold its input from the first forward on."""
    block = nn.Sequential(linear(6, 6), nn.Tanh())
    Stage([block], 0, SEED, CPU, splits_backward=True, runs=[LayerRun.AGAIN])
    assert block[0].recomputed


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
