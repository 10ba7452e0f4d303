"""Updates of a pipeline against plain PyTorch on one device: torch's own clipping, scaler, schedulers and groups."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from in_process import InProcessTransport, World
from plain import (
    MLP,
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
from ranks import CPU, SGD, Outcome, Point, alone, run, sgd, unseen
from torch import nn
from torch.optim import Optimizer

from pipebench.compose import compose_grid
from pipebench.config import OptimizerConfig
from pipebench.engine import update
from pipebench.engine.optimizer import make_optimizer
from pipebench.engine.stage import Loss, Stage
from pipebench.engine.stopwatch import HostStopwatch
from pipebench.engine.update import LossScale, Update
from pipebench.harness.gate import plain_gradients
from pipebench.models import layer_sequence
from pipebench.peers.protocol import Parts
from pipebench.peers.single import SingleProcess
from pipebench.schedule.action import Op
from pipebench.schedule.builders import Recompute, with_optimizer, with_optimizer_last
from pipebench.schedule.catalogue import build as build_schedule

M = 3
ADAMW = OptimizerConfig(name="adamw", lr=0.01)
TIED = dataclasses.replace(TRANSFORMER, layers=3, tied=True)
DEEP = dataclasses.replace(MLP, layers=6)

EVERY_CUT = [
    ("gpipe", 1, None),
    ("gpipe", 2, None),
    ("1f1b", 3, None),
    ("1f1b", 4, None),
    ("interleaved", 1, 2),
    ("interleaved", 2, 2),
    ("looped_bfs", 2, 3),
    ("zb_h1", 3, None),
    ("zb_v", 2, None),
    ("zb_v", 4, None),
]
"""Schedule, K, and stages of a rank: neighbours, chunks, and first and last stage on one rank (zb_v)."""

every_cut = pytest.mark.parametrize(("name", "num_ranks", "chunks"), EVERY_CUT)


@dataclass
class Plain:
    """What one device makes of some mini-batches: layers, and gradient norm and scale at each update."""

    layers: list[nn.Module]
    norms: list[float]
    scales: list[float]


def train_plainly(
    model: Model,
    num_steps: int,
    make: Callable[[list[nn.Parameter]], Optimizer],
    *,
    accumulate: int = 1,
    clip_norm: float = float("inf"),
    scaler: torch.amp.GradScaler | None = None,
    rates: list[float] | None = None,
    autocast: torch.dtype | None = None,
    num_micro_batches: int = M,
) -> Plain:
    layers, loss_of = build(model)
    trained = list(nn.ModuleList(layers).parameters())
    optimizer = make(trained)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    plain = Plain(layers, [], [])
    for step in range(num_steps):
        factor = float(scaler.scale(torch.ones(()))) / accumulate
        plain_backward(layers, loss_of, mini_batch(model, step), num_micro_batches, step, autocast, factor)
        if (step + 1) % accumulate:
            continue
        if rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = rates[step // accumulate]
        plain.scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        plain.norms.append(float(nn.utils.clip_grad_norm_(trained, clip_norm)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return plain


def train(
    model: Model,
    num_steps: int,
    settings: OptimizerConfig,
    name: str = "1f1b",
    num_ranks: int = 2,
    chunks: int | None = None,
    make: Callable[..., Optimizer] | None = None,
    autocast: torch.dtype | None = None,
) -> Outcome:
    point = Point(model, name, Recompute.EXCEPT_LAST, num_ranks, M, chunks=chunks, autocast=autocast)
    return run(point, num_steps, train=True, optimizer=settings, make_optimizer=make)


def settings(**values: object) -> OptimizerConfig:
    return dataclasses.replace(SGD, **values)  # type: ignore[arg-type]


def soft_adamw(own: object) -> Optimizer:
    """AdamW whose step does not depend on the sign of rounding noise, which key biases have for a gradient."""
    return torch.optim.AdamW(own, lr=0.01, eps=1e-2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "num_ranks", "chunks", "config", "make"),
    [
        *((*cut, SGD, sgd) for cut in EVERY_CUT),
        ("1f1b", 4, None, ADAMW, soft_adamw),
        ("zb_v", 2, None, ADAMW, soft_adamw),
        ("interleaved", 1, 2, ADAMW, soft_adamw),
    ],
)
def test_tied_copies_stay_equal_to_the_bit_and_train_as_one_parameter(
    name: str, num_ranks: int, chunks: int | None, config: OptimizerConfig, make: Callable[..., Optimizer]
) -> None:
    outcome = train(TIED, 6, config, name, num_ranks, chunks, make)
    embedding, head = outcome.layers[0].token.weight, outcome.layers[-1].project.weight
    assert torch.equal(embedding, head)
    assert_close(parameters(outcome.layers), parameters(train_plainly(TIED, 6, make).layers))


@every_cut
def test_the_gradients_of_tied_copies_are_told_as_their_sum(name: str, num_ranks: int, chunks: int | None) -> None:
    outcome = run(Point(TIED, name, num_stages=num_ranks, num_micro_batches=M, chunks=chunks))
    reference = plain_gradients(layer_sequence(TIED), mini_batch(TIED), M, SEED, 0, CPU, None, 1.0)
    for layer, own in zip(reference, outcome.gradients, strict=True):
        found = {str(place): gradient for place, gradient in enumerate(own)}
        expected = {str(place): parameter.grad for place, parameter in enumerate(layer.parameters())}
        assert_close(found, expected)  # type: ignore[arg-type]


@every_cut
def test_the_norm_counts_what_is_tied_once_and_clips_as_torch_does(
    name: str, num_ranks: int, chunks: int | None
) -> None:
    outcome = train(TIED, 3, settings(clip_norm=0.1), name, num_ranks, chunks)
    plain = train_plainly(TIED, 3, sgd, clip_norm=0.1)
    assert min(plain.norms) > 0.1, "nothing was clipped"
    assert [each.gradient_norm for each in outcome.updates if each] == pytest.approx(plain.norms, rel=1e-5)
    assert_close(parameters(outcome.layers), parameters(plain.layers))


def test_a_rank_that_trains_nothing_takes_part_in_the_norm() -> None:
    def freeze(layers: list[nn.Module]) -> None:
        for layer in layers[:4]:
            layer.requires_grad_(False)

    point = Point(DEEP, "1f1b", num_stages=2, num_micro_batches=M)
    outcome = run(point, 1, train=True, optimizer=settings(clip_norm=0.1), prepare=freeze)
    layers, loss_of = build(DEEP)
    freeze(layers)
    plain_backward(layers, loss_of, mini_batch(DEEP), M)
    norm = nn.utils.clip_grad_norm_(nn.ModuleList(layers).parameters(), 0.1)
    [told] = [each.gradient_norm for each in outcome.updates if each]
    assert told == pytest.approx(float(norm), rel=1e-5)
    sgd([p for p in nn.ModuleList(layers).parameters() if p.requires_grad]).step()
    assert_close(parameters(outcome.layers[4:]), parameters(layers[4:]))
    assert_identical(parameters(outcome.layers[:4]), parameters(layers[:4]))


def test_a_norm_below_the_limit_changes_nothing() -> None:
    assert_identical(
        parameters(train(DEEP, 3, settings(clip_norm=1e6)).layers), parameters(train(DEEP, 3, settings()).layers)
    )


@every_cut
def test_several_mini_batches_make_one_update(name: str, num_ranks: int, chunks: int | None) -> None:
    outcome = train(DEEP, 6, settings(accumulate=3), name, num_ranks, chunks)
    assert [each is not None for each in outcome.updates] == [False, False, True] * 2
    assert_close(parameters(outcome.layers), parameters(train_plainly(DEEP, 6, sgd, accumulate=3).layers))


def test_steps_that_only_accumulate_keep_their_gradients_and_leave_the_weights() -> None:
    outcome = train(DEEP, 2, settings(accumulate=3))
    layers, loss_of = build(DEEP)
    assert_identical(parameters(outcome.layers), parameters(layers))
    for step in range(2):
        plain_backward(layers, loss_of, mini_batch(DEEP, step), M, step, factor=1 / 3)
    assert_close(gradients(outcome.layers), gradients(layers))


@every_cut
def test_a_dynamic_scale_skips_overflows_on_all_ranks_and_grows_again_as_torchs_scaler_does(
    name: str, num_ranks: int, chunks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^20 is too much for fp16, whose largest number is 2^16; `run` sees that all ranks say the same."""
    monkeypatch.setattr(update, "FIRST_SCALE", 2.0**20)
    monkeypatch.setattr(update, "GROWTH_INTERVAL", 2)
    half = torch.float16
    outcome = train(DEEP, 8, settings(loss_scale="dynamic"), name, num_ranks, chunks, autocast=half)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    plain = train_plainly(DEEP, 8, sgd, scaler=scaler, autocast=half)
    updates = [each for each in outcome.updates if each]
    assert [each.loss_scale for each in updates] == plain.scales
    assert [each.skipped for each in updates].count(True) >= 2
    assert [each.skipped for each in updates].count(False) >= 2
    assert_close(parameters(outcome.layers), parameters(plain.layers), within=1e-3)


def test_a_fixed_scale_changes_no_weight_and_is_never_learned() -> None:
    scaled = train(DEEP, 3, settings(loss_scale=1024.0))
    assert_identical(parameters(scaled.layers), parameters(train(DEEP, 3, settings()).layers))
    assert [each.loss_scale for each in scaled.updates if each] == [1024.0] * 3
    assert scaled.losses == train(DEEP, 3, settings()).losses


def test_a_dynamic_scale_doubles_after_two_thousand_good_updates() -> None:
    scale = LossScale(8.0, dynamic=True)
    for _ in range(1999):
        scale.learn(overflowed=False)
    assert scale.value == 8.0
    scale.learn(overflowed=False)
    assert scale.value == 16.0


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_everything_together_is_what_one_device_would_have_done(num_ranks: int) -> None:
    config = settings(
        accumulate=2, clip_norm=0.1, loss_scale=512.0, lr_schedule="cosine", lr_warmup=1, lr_decay=3,
        weight_decay=0.3, decay="matrices", momentum=0.9,
    )  # fmt: skip

    def make(own: list[nn.Parameter]) -> Optimizer:
        flat = [p for p in own if p.ndim < 2]
        groups = [{"params": [p for p in own if p.ndim >= 2], "weight_decay": 0.3}, {"params": flat, "weight_decay": 0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    outcome = train(TIED, 8, config, num_ranks=num_ranks)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    plain = train_plainly(TIED, 8, make, accumulate=2, clip_norm=0.1, scaler=scaler, rates=[0.1, 0.1, 0.05, 0.0])
    assert [each.learning_rate for each in outcome.updates if each] == pytest.approx([0.1, 0.1, 0.05, 0.0])
    assert_close(parameters(outcome.layers), parameters(plain.layers))


def test_where_ranks_need_not_agree_each_stage_updates_at_once() -> None:
    at_once, together = settings(lr_warmup=3), settings(clip_norm=1.0)
    for config, place in [(at_once, with_optimizer), (together, with_optimizer_last)]:
        outcome = train(DEEP, 1, config, "interleaved", 2, 2)
        point = Point(DEEP, "interleaved", Recompute.EXCEPT_LAST, 2, M, chunks=2)
        expected = place(point.schedule).rows
        assert [[span.action for span in spans] for spans in outcome.spans] == [list(row) for row in expected]
    assert expected != with_optimizer(point.schedule).rows, "the two places are one here"


def test_a_frozen_parameter_is_in_no_optimizer_and_stays() -> None:
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    before = layer.bias.clone()
    frozen = nn.Linear(4, 4).requires_grad_(False)
    stepping = Update(alone(), {0: list(layer.parameters()), 1: list(frozen.parameters())}, sgd)
    assert list(stepping.optimizers) == [0]
    layer(torch.ones(2, 4)).sum().backward()
    stepping.begin(0)
    stepping.prepare()
    for stage in range(2):
        stepping.step(stage)
    assert torch.equal(layer.bias, before)
    assert len(stepping.optimizers[0].param_groups[0]["params"]) == 1


@pytest.mark.parametrize(("name", "decay"), [("adamw", 0.01), ("adam", 0.0), ("sgd", 0.0)])
def test_the_decay_that_nobody_sets_is_torchs_own(name: str, decay: float) -> None:
    optimizer = make_optimizer(OptimizerConfig(name=name, lr=0.1), list(nn.Linear(2, 2).parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [decay]


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(5, 2))
    config = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.2, decay="matrices")
    optimizer = make_optimizer(config, list(model.parameters()))
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    told = {name: decays[parameter] for name, parameter in model.named_parameters()}
    assert told == {"0.weight": 0.2, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.2}


def test_a_row_ends_with_its_optimizers_where_a_rank_holds_both_ends_of_a_tie() -> None:
    outcome = train(TIED, 1, settings(), "zb_v", 2)
    for spans in outcome.spans[:1]:
        assert [span.action.op for span in spans[-2:]] == [Op.OPTIMIZER, Op.OPTIMIZER]


@pytest.mark.parametrize("micro", [1, 3])
def test_one_process_without_a_pipeline_updates_alike(micro: int) -> None:
    config = settings(accumulate=2, clip_norm=0.1, loss_scale=512.0)
    layers, loss = build(TIED)
    stages = {0: Stage(layers, 0, SEED, CPU, None, Loss(loss))}
    [point] = compose_grid([f"micro={micro}", "batch=11", "stages=1", "engine=single"]).points  # type: ignore[union-attr]
    around = (sgd, alone(config), InProcessTransport(World(), 0), HostStopwatch(), unseen(), lambda sizes: {})
    engine = SingleProcess(Parts(point, build_schedule("gpipe", 1, micro), 0, CPU, stages, {}, *around))
    outcomes = [engine.train(step, mini_batch(TIED, step)) for step in range(4)]
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    plain = train_plainly(TIED, 4, sgd, accumulate=2, clip_norm=0.1, scaler=scaler, num_micro_batches=micro)
    assert [each.update is not None for each in outcomes] == [False, True] * 2
    assert_close(parameters(layers), parameters(plain.layers))
