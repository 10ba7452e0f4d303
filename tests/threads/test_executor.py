"""The real executor against plain PyTorch, over schedules x recompute x (K, M), ragged mini-batches, dropout on."""

import dataclasses
from functools import cache, partial

import pytest
import torch
from plain import (
    MLP,
    MODELS,
    SEED,
    TRANSFORMER,
    Model,
    assert_close,
    assert_identical,
    build,
    gradients,
    mini_batch,
    parameters,
    plain_backward,
)
from ranks import CPU, SGD, Point, run
from torch import Tensor, nn

from pipebench.config import OptimizerConfig
from pipebench.engine.stage import Stage
from pipebench.errors import StageError
from pipebench.harness.gate import plain_gradients
from pipebench.models import layer_sequence
from pipebench.models.layers import build_layers
from pipebench.schedule.action import Op
from pipebench.schedule.builders import IN_ROWS, Recompute
from pipebench.schedule.builders import SCHEDULES as ALL_SCHEDULES
from pipebench.schedule.memory import StageActivations, peak_activation_bytes
from pipebench.schedule.search import search

SCHEDULES = ["gpipe", "1f1b", "naive", "interleaved", "zb_h1", "zb_v"]
"""Those that stand for their kinds."""

EVERY_SCHEDULE = [
    (name, chunks)
    for name, recipe in ALL_SCHEDULES.items()
    for chunks in range(recipe.least_chunks, (recipe.most_chunks or 3) + 1)
]
"""With every number of stages a rank that it is defined for, up to 3."""

DEEP: dict[str, Model] = {
    "transformer": dataclasses.replace(TRANSFORMER, layers=5),
    "mlp": dataclasses.replace(MLP, layers=10),
}
"""Twelve layers: one for each stage of four ranks with three."""
NUM_SAMPLES = 11

every_schedule = pytest.mark.parametrize("name", SCHEDULES)
every_recompute = pytest.mark.parametrize(
    "recompute", [Recompute.NEVER, *IN_ROWS], ids=lambda recompute: recompute.value
)
both_models = pytest.mark.parametrize("model", ["transformer", "mlp"])


@cache
def expected(
    model: str, num_micro_batches: int, num_samples: int = NUM_SAMPLES, deep: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Plain PyTorch's loss and gradients of the first mini-batch."""
    config = (DEEP if deep else MODELS)[model]
    layers, loss_of = build(config)
    loss = plain_backward(layers, loss_of, mini_batch(config, 0, num_samples), num_micro_batches)
    return loss, gradients(layers)


@pytest.mark.parametrize(("model", "num_micro_batches"), [("mlp", 1), ("mlp", 3), ("mlp", 8), ("transformer", 5)])
@pytest.mark.parametrize(("name", "chunks"), EVERY_SCHEDULE)
@every_recompute
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_loss_and_gradients_equal_plain_pytorch(
    model: str, name: str, chunks: int, recompute: Recompute, num_ranks: int, num_micro_batches: int
) -> None:
    outcome = run(Point(DEEP[model], name, recompute, num_ranks, num_micro_batches, chunks=chunks))
    loss, expected_gradients = expected(model, num_micro_batches, deep=True)
    assert_close(gradients(outcome.layers), expected_gradients)
    assert outcome.losses == [pytest.approx(loss, rel=1e-6)]


@pytest.mark.parametrize("chunks", [1, 2])
@every_recompute
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 5])
def test_what_a_search_finds_equals_plain_pytorch(
    chunks: int, recompute: Recompute, num_ranks: int, num_micro_batches: int
) -> None:
    stages = range(num_ranks * chunks)
    costs = {(stage, op): 1.0 + stage % 3 / 4 for stage in stages for op in Op}
    kept = [StageActivations(1.0, 0.25, 0.75)] * len(stages)
    found = search(num_ranks, num_micro_batches, chunks, costs, kept, 1.5 * len(stages), 0.1, recompute)
    outcome = run(Point(DEEP["mlp"], rows=found.schedule, num_stages=num_ranks, num_micro_batches=num_micro_batches))
    loss, expected_gradients = expected("mlp", num_micro_batches, deep=True)
    assert_close(gradients(outcome.layers), expected_gradients)
    assert outcome.losses == [pytest.approx(loss, rel=1e-6)]


@pytest.mark.parametrize("model", ["classifier", "synthetic"])
@every_schedule
@every_recompute
def test_the_other_models_equal_plain_pytorch_too(model: str, name: str, recompute: Recompute) -> None:
    outcome = run(Point(MODELS[model], name, recompute, num_stages=3, num_micro_batches=4))
    loss, expected_gradients = expected(model, 4)
    assert_close(gradients(outcome.layers), expected_gradients)
    assert outcome.losses == [pytest.approx(loss, rel=1e-6)]


@pytest.mark.parametrize(("num_samples", "num_micro_batches"), [(8, 8), (12, 4), (1, 1), (7, 5)])
@every_schedule
def test_other_mini_batch_sizes_equal_plain_pytorch(name: str, num_samples: int, num_micro_batches: int) -> None:
    outcome = run(Point(MODELS["mlp"], name, Recompute.EXCEPT_LAST, 3, num_micro_batches, num_samples))
    loss, expected_gradients = expected("mlp", num_micro_batches, num_samples)
    assert_close(gradients(outcome.layers), expected_gradients)
    assert outcome.losses == [pytest.approx(loss, rel=1e-6)]


def without_dropout(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer.eval()


@both_models
@every_schedule
@pytest.mark.parametrize("num_micro_batches", [2, 5, 8])
def test_without_dropout_cutting_the_mini_batch_changes_nothing(model: str, name: str, num_micro_batches: int) -> None:
    layers, loss_of = build(MODELS[model])
    without_dropout(layers)
    batch = mini_batch(MODELS[model])
    x = batch.inputs
    for layer in layers:
        x = layer(x)
    whole_loss = loss_of(x, batch.targets)
    whole_loss.backward()
    outcome = run(
        Point(MODELS[model], name, num_stages=3, num_micro_batches=num_micro_batches), prepare=without_dropout
    )
    assert_close(gradients(outcome.layers), gradients(layers))
    assert outcome.losses == [pytest.approx(float(whole_loss.detach()), rel=1e-6)]


@both_models
@every_schedule
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_recompute_changes_no_bit_of_any_gradient(model: str, name: str, num_micro_batches: int) -> None:
    never, except_last, always = (
        run(Point(MODELS[model], name, recompute, 3, num_micro_batches))
        for recompute in (Recompute.NEVER, Recompute.EXCEPT_LAST, Recompute.ALWAYS)
    )
    assert_identical(gradients(always.layers), gradients(never.layers))
    assert_identical(gradients(except_last.layers), gradients(never.layers))
    assert always.losses == except_last.losses == never.losses


TORCH = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
ADAMW = OptimizerConfig(name="adamw", lr=0.01)


@pytest.mark.parametrize(
    # AdamW divides by the gradient's own size, so the transformer's key biases, whose gradient is rounding
    # noise, would move at random.
    ("model", "settings"),
    [("transformer", SGD), ("mlp", SGD), ("mlp", ADAMW)],
    ids=["transformer-sgd", "mlp-sgd", "mlp-adamw"],
)
@every_schedule
@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS], ids=["never", "always"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_three_training_steps_give_the_weights_of_plain_pytorch(
    model: str, settings: OptimizerConfig, name: str, recompute: Recompute, num_stages: int
) -> None:
    layers, loss_of = build(MODELS[model])
    optimizer = TORCH[settings.name]([p for layer in layers for p in layer.parameters()], lr=settings.lr)
    losses = []
    for step in range(3):
        losses.append(plain_backward(layers, loss_of, mini_batch(MODELS[model], step), 4, step))
        optimizer.step()
        optimizer.zero_grad()
    outcome = run(Point(MODELS[model], name, recompute, num_stages, 4), 3, train=True, optimizer=settings)
    assert_close(parameters(outcome.layers), parameters(layers))
    assert outcome.losses == [pytest.approx(loss, rel=1e-5) for loss in losses]
    assert all(parameter.grad is None for layer in outcome.layers for parameter in layer.parameters())
    untrained, _ = build(MODELS[model])
    assert not torch.equal(next(layers[0].parameters()), next(untrained[0].parameters()))


@every_schedule
def test_accumulating_twice_adds_gradients_and_leaves_the_weights(name: str) -> None:
    layers, loss_of = build(MODELS["mlp"])
    before = parameters(layers)
    for step in range(2):
        plain_backward(layers, loss_of, mini_batch(MODELS["mlp"], step), 3, step)
    outcome = run(Point(MODELS["mlp"], name), num_steps=2)
    assert_close(gradients(outcome.layers), gradients(layers))
    assert_identical(parameters(outcome.layers), before)


@pytest.mark.parametrize("model", list(MODELS))
@every_recompute
def test_bf16_equals_plain_pytorch_under_autocast(model: str, recompute: Recompute) -> None:
    layers, loss_of = build(MODELS[model])
    loss = plain_backward(layers, loss_of, mini_batch(MODELS[model]), 3, autocast=torch.bfloat16)
    outcome = run(Point(MODELS[model], "1f1b", recompute, 3, autocast=torch.bfloat16))
    assert_close(gradients(outcome.layers), gradients(layers), within=1e-2)
    assert outcome.losses == [pytest.approx(loss, rel=1e-3)]


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_predicted_boundary_is_the_shape_and_dtype_of_the_real_output(
    model: str, autocast: torch.dtype | None
) -> None:
    point = Point(MODELS[model], num_stages=4, num_micro_batches=3, autocast=autocast)
    stages = point.stages(*build(MODELS[model]))
    bundles = point.bundles(stages)
    for micro_batch, x in enumerate(mini_batch(MODELS[model]).inputs.tensor_split(3)):
        for rank, stage in enumerate(stages):
            x = stage.forward(x, 0, micro_batch)
            [spec] = bundles[rank, rank + 1][micro_batch].tensors
            assert (tuple(x.shape), x.dtype) == (spec.shape, spec.dtype)


def test_predicting_a_boundary_draws_no_random_number_and_touches_no_weight() -> None:
    point = Point(MODELS["transformer"], num_stages=2)
    stages = point.stages(*build(MODELS["transformer"]))
    before = [parameters([stage.module]) for stage in stages]
    state = torch.default_generator.get_state()
    point.bundles(stages)
    assert torch.equal(torch.default_generator.get_state(), state)
    for stage, weights in zip(stages, before, strict=True):
        assert_identical(parameters([stage.module]), weights)


@both_models
def test_a_layer_draws_the_same_dropout_mask_whatever_stage_and_schedule_it_is_in(model: str) -> None:
    def keep(kept: list[Tensor], layer: nn.Module, inputs: object, output: Tensor) -> None:
        if not output.is_meta:
            kept.append(output.detach().clone())

    def outputs_of(point: Point) -> dict[int, list[Tensor]]:
        outputs: dict[int, list[Tensor]] = {}

        def record(layers: list[nn.Module]) -> None:
            for index, layer in enumerate(layers):
                kept = outputs.setdefault(index, [])
                layer.register_forward_hook(partial(keep, kept))

        run(point, prepare=record)
        return outputs

    reference = outputs_of(Point(MODELS[model], num_stages=1, num_micro_batches=3))
    for num_stages, name in [(2, "gpipe"), (3, "1f1b"), (4, "naive")]:
        found = outputs_of(Point(MODELS[model], name, num_stages=num_stages, num_micro_batches=3))
        for index, outputs in reference.items():
            assert len(found[index]) == len(outputs) == 3
            for ours, theirs in zip(found[index], outputs, strict=True):
                assert torch.equal(ours, theirs), f"K={num_stages}: layer {index}"


def test_dropout_differs_between_layers_micro_batches_and_steps() -> None:
    dropouts = [nn.Dropout(0.5), nn.Dropout(0.5)]
    ones = torch.ones(4, 64)
    first, second = (Stage([dropout], index, SEED, CPU) for index, dropout in enumerate(dropouts))
    masks = [
        first.forward(ones, 0, 0),
        second.forward(ones, 0, 0),
        first.forward(ones, 0, 1),
        first.forward(ones, 1, 0),
    ]
    for index, mask in enumerate(masks):
        assert all(not torch.equal(mask, other) for other in masks[:index])
    assert torch.equal(masks[0], first.forward(ones, 0, 0))


class Boom(nn.Module):
    """Linear map that fails on its nth forward, or in the backward of its nth forward."""

    def __init__(self, width: int, forward: int = 0, backward: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._forward_at, self._backward_at, self._num_calls = forward, backward, 0

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return self.linear(x)
        self._num_calls += 1
        if self._num_calls == self._forward_at:
            raise ValueError("boom")
        y = self.linear(x)
        if self._num_calls == self._backward_at:
            y.register_hook(self._explode)
        return y

    @staticmethod
    def _explode(gradient: Tensor) -> Tensor:
        raise ValueError("boom")


@pytest.mark.parametrize(
    ("name", "recompute", "boom", "message"),
    [
        ("gpipe", Recompute.NEVER, {"forward": 2}, "rank 1 failed at 1F1: boom"),
        ("gpipe", Recompute.NEVER, {"backward": 2}, "rank 1 failed at 1B1: boom"),
        ("gpipe", Recompute.ALWAYS, {"forward": 4}, "rank 1 failed at 1R2: boom"),
        ("1f1b", Recompute.NEVER, {"backward": 1}, "rank 1 failed at 1B0: boom"),
    ],
)
def test_an_error_names_its_rank_and_action(
    name: str, recompute: Recompute, boom: dict[str, int], message: str
) -> None:
    def prepare(layers: list[nn.Module]) -> None:
        layers[3] = Boom(16, **boom)  # of 5 layers, the first of the second stage

    with pytest.raises(StageError) as caught:
        run(Point(MODELS["mlp"], name, recompute), prepare=prepare)
    assert str(caught.value) == message
    assert isinstance(caught.value.__cause__, ValueError)


@every_schedule
def test_spans_follow_the_row_on_one_clock_and_respect_every_dependency(name: str) -> None:
    point = Point(MODELS["transformer"], name, Recompute.EXCEPT_LAST, num_stages=3, num_micro_batches=4)
    outcome = run(point)
    spans = {span.action: span for rank_spans in outcome.spans for span in rank_spans}
    for rank, row in enumerate(point.schedule.rows):
        assert [span.action for span in outcome.spans[rank]] == list(row)
        assert all(span.rank == rank for span in outcome.spans[rank])
        for action in row:
            assert spans[action].end_s >= spans[action].start_s
            for needed in point.schedule.dependencies(action):
                assert spans[needed].end_s <= spans[action].start_s, f"{action} began before {needed} ended"


def test_training_spans_end_with_the_optimizer() -> None:
    outcome = run(Point(MODELS["mlp"]), train=True)
    assert [spans[-1].action.op for spans in outcome.spans] == [Op.OPTIMIZER, Op.OPTIMIZER]


@pytest.mark.parametrize(
    ("name", "recompute", "peaks"),
    [
        ("gpipe", Recompute.NEVER, [5, 5, 5]),
        ("1f1b", Recompute.NEVER, [3, 2, 1]),
        ("naive", Recompute.NEVER, [1, 1, 1]),
        ("gpipe", Recompute.ALWAYS, [1, 1, 1]),
        ("1f1b", Recompute.ALWAYS, [1, 1, 1]),
        ("gpipe", Recompute.EXCEPT_LAST, [1, 1, 1]),
        ("1f1b", Recompute.EXCEPT_LAST, [2, 2, 1]),
    ],
)
def test_a_stage_holds_as_many_graphs_as_its_schedule_says(name: str, recompute: Recompute, peaks: list[int]) -> None:
    """Count what autograd keeps between a layer's forward and its backward; a recomputed forward keeps nothing."""
    alive = [0, 0, 0]
    most = [0, 0, 0]

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, stage: int) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.stage = stage
            alive[stage] += 1
            most[stage] = max(most[stage], alive[stage])
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
            alive[ctx.stage] -= 1
            return gradient, None

    class Counting(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return Counted.apply(y, self.stage) if torch.is_grad_enabled() and not y.is_meta else y

    def prepare(layers: list[nn.Module]) -> None:
        layers[:] = [nn.Linear(8, 16), Counting(0), Counting(1), nn.Linear(16, 16), Counting(2), nn.Linear(16, 4)]

    point = Point(MODELS["mlp"], name, recompute, num_stages=3, num_micro_batches=5)
    run(point, prepare=prepare)
    assert most == peaks
    full_graphs_only = [StageActivations(full_bytes=1, input_bytes=0)] * 3
    assert most == peak_activation_bytes(point.schedule, full_graphs_only)
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_the_gates_reference_agrees_with_this_one(model: str, num_micro_batches: int) -> None:
    batch = mini_batch(MODELS[model], 2)
    layers, loss_of = build(MODELS[model])
    plain_backward(layers, loss_of, batch, num_micro_batches, step=2)
    gate = plain_gradients(layer_sequence(MODELS[model]), batch, num_micro_batches, SEED, 2, CPU, None, 1.0)
    assert_close(gradients(gate), gradients(layers), within=1e-6)


@pytest.mark.parametrize("model", list(MODELS))
def test_a_stage_that_builds_only_its_own_layers_gets_the_weights_of_the_whole_model(model: str) -> None:
    whole, _ = build(MODELS[model])
    own = build_layers(layer_sequence(MODELS[model]), [3, 1], SEED)
    assert_identical(parameters(own), parameters([whole[3], whole[1]]))
