"""What people train with, through the real executor, against plain PyTorch: a loop over micro-batches and layers."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from plain import (
    SEED,
    TRANSFORMER,
    assert_close,
    assert_identical,
    build,
    gradients,
    mini_batch,
    parameters,
    plain_backward,
)
from ranks import Outcome, Point, run
from torch import Tensor, nn
from torch.nn import functional

from pipebench.config import OptimizerConfig, UMlpConfig
from pipebench.data.batch import MiniBatch
from pipebench.models import layer_sequence
from pipebench.models.layers import LayerSequence, one_by_one
from pipebench.schedule.builders import SCHEDULES, Recompute
from pipebench.seeds import Purpose, seed_of

VOCABULARY, TOKENS, WIDTH = 13, 5, 8
PADDING = -100

every_schedule = pytest.mark.parametrize("name", list(SCHEDULES))
every_recompute = pytest.mark.parametrize(
    "recompute",
    [setting for setting in Recompute if setting != Recompute.SELECTIVE],  # nothing here has attention scores
    ids=lambda recompute: recompute.value,
)
up_to_four_ranks = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])

Travelling = tuple[Tensor, Tensor, Tensor]
"""A stream of floats, a mask of bools, and a scale in double precision that nothing learns."""


class Embed(nn.Module):
    stashes = ("tokens",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Travelling, Tensor]:
        tokens, mask, scale = value
        return (self.embedding(tokens), mask, scale), tokens


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, value: Travelling) -> Travelling:
        x, mask, scale = value
        update = self.dropout(torch.tanh(self.linear(x))) * scale.float()
        return x + torch.where(mask.unsqueeze(-1), update, 0.0), mask, scale


class Keep(nn.Module):
    stashes = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Travelling) -> tuple[Travelling, Tensor]:
        x, mask, scale = value
        return (self.linear(x), mask, scale), x


class Join(nn.Module):
    pops = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: Travelling, kept: Tensor) -> Travelling:
        x, mask, scale = value
        return self.linear(torch.cat([x, kept], dim=-1)), mask, scale


class Normalize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, value: Travelling) -> Travelling:
        x, mask, scale = value
        return self.norm(x.transpose(1, 2)).transpose(1, 2), mask, scale


class Balance(nn.Module):
    """Adds to the loss from a module inside, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.auxiliary_loss = None  # type: ignore[assignment]

    def forward(self, value: Travelling) -> Travelling:
        x, mask, scale = value
        y = self.inner(x)
        self.inner.auxiliary_loss = 0.1 * y.square().mean()
        return x + y, mask, scale


class Squash(nn.Module):
    """Has no parameters."""

    def forward(self, value: Travelling) -> Travelling:
        return functional.gelu(value[0]), value[1], value[2]


class Remember(nn.Module):
    """Takes whole numbers that the first layer kept."""

    pops = ("tokens",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, value: Travelling, tokens: Tensor) -> Travelling:
        return value[0] + self.embedding(tokens), value[1], value[2]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, value: Travelling) -> Tensor:
        logits: Tensor = self.linear(value[0])
        return logits


def frozen() -> nn.Module:
    return Mix().requires_grad_(False)


def valid(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def mean_over_valid(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


EVERYTHING = LayerSequence(
    12,
    one_by_one([Embed, Mix, Keep, frozen, Balance, Normalize, Squash, Mix, Join, Balance, Remember, Head]),
    mean_over_valid,
    valid,
)


def sentences(step: int, num_samples: int) -> MiniBatch:
    """Tokens, of which some are padding: all of the last samples', so that a micro-batch has nothing to learn."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (num_samples, TOKENS + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = PADDING
    targets[-num_samples // 4 :] = PADDING
    scale = torch.rand(num_samples, 1, 1, dtype=torch.float64, generator=generator)
    return MiniBatch((tokens[:, :-1].contiguous(), tokens[:, :-1] % 3 > 0, scale), targets)


def plain_step(layers: list[nn.Module], model: LayerSequence, batch: MiniBatch, num_micro_batches: int) -> float:
    """Add up the gradients of the mini-batch's loss in `.grad`; no engine, only the seeds of dropout are ours."""
    pieces = [piece.tensor_split(num_micro_batches) for piece in (*batch.inputs, batch.targets)]
    whole = float(valid(batch.targets))  # type: ignore[arg-type]
    total = 0.0
    for micro_batch, (*inputs, targets) in enumerate(zip(*pieces, strict=True)):
        value: Any = tuple(inputs)
        kept: dict[str, Tensor] = {}
        auxiliary: list[Tensor] = []
        for index, layer in enumerate(layers):
            torch.default_generator.manual_seed(seed_of(SEED, Purpose.DROPOUT, 0, micro_batch, index))
            match layer:
                case Embed():
                    value, kept["tokens"] = layer(value)
                case Keep():
                    value, kept["kept"] = layer(value)
                case Join():
                    value = layer(value, kept["kept"])
                case Remember():
                    value = layer(value, kept["tokens"])
                case _:
                    value = layer(value)
            if isinstance(layer, Balance):
                auxiliary.append(layer.inner.auxiliary_loss)  # type: ignore[arg-type]
        sums = functional.cross_entropy(value.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
        loss = sums / whole + sum(auxiliary) * (len(targets) / len(batch))
        loss.backward()
        total += float(loss.detach())
    return total


@cache
def expected(num_micro_batches: int) -> tuple[float, dict[str, Tensor]]:
    layers, _ = build(EVERYTHING)
    loss = plain_step(layers, EVERYTHING, sentences(0, 11), num_micro_batches)
    return loss, learned(layers)


def learned(layers: list[nn.Module]) -> dict[str, Tensor]:
    return gradients([layer for layer in layers if any(p.requires_grad for p in layer.parameters())])


@every_schedule
@every_recompute
@up_to_four_ranks
def test_everything_at_once_equals_plain_pytorch(name: str, recompute: Recompute, num_ranks: int) -> None:
    """Tuples, whole numbers, bools, doubles, skips of both, frozen and empty layers, padding, auxiliary losses."""
    outcome = run(Point(EVERYTHING, name, recompute, num_ranks, 4, data=sentences))
    loss, wanted = expected(4)
    assert outcome.losses == [pytest.approx(loss, rel=1e-6)]
    assert_close(learned(outcome.layers), wanted)
    assert all(p.grad is None for layer in outcome.layers for p in layer.parameters() if not p.requires_grad)


U_MLP = layer_sequence(UMlpConfig(name="tiny", depth=4, width=16, inputs=6, outputs=3, dropout=0.2))


def points_in_space(step: int, num_samples: int) -> MiniBatch:
    generator = torch.Generator().manual_seed(200 + step)
    return MiniBatch(torch.randn(num_samples, 6, generator=generator), torch.randn(num_samples, 3, generator=generator))


@cache
def expected_of_u(num_micro_batches: int) -> dict[str, Tensor]:
    layers, _ = build(U_MLP)
    batch = points_in_space(0, 11)
    pieces = batch.split([len(x) for x in torch.zeros(11).tensor_split(num_micro_batches)])
    for micro_batch, piece in enumerate(pieces):
        x, target = piece.inputs, piece.targets
        kept = []
        for index, layer in enumerate(layers):
            torch.default_generator.manual_seed(seed_of(SEED, Purpose.DROPOUT, 0, micro_batch, index))
            if 1 <= index <= 4:
                x, way_down = layer(x)
                kept.append(way_down)
            elif 6 <= index <= 9:
                x = layer(x, kept.pop())
            else:
                x = layer(x)
        (functional.mse_loss(x, target) * len(x) / 11).backward()
    return gradients(layers)


@every_schedule
@every_recompute
@up_to_four_ranks
def test_skips_of_the_u_shaped_mlp_cross_stages(name: str, recompute: Recompute, num_ranks: int) -> None:
    outcome = run(Point(U_MLP, name, recompute, num_ranks, 3, data=points_in_space))
    assert_close(gradients(outcome.layers), expected_of_u(3))


def test_a_skip_goes_straight_to_its_consumers_rank_and_its_gradient_straight_back() -> None:
    schedule = Point(U_MLP, num_stages=4, num_micro_batches=1, data=points_in_space).schedule
    passing = {(str(transfer.producer), str(transfer.consumer)) for transfer in schedule.transfers()}
    assert schedule.skips == ((0, 2), (0, 3))
    assert {("0F0", "2F0"), ("2B0", "0B0"), ("0F0", "3F0"), ("3B0", "0B0")} < passing
    assert len(passing) == 2 * (3 + 2)


@pytest.mark.parametrize("name", ["naive", "1f1b", "zb_h1"])
@every_recompute
def test_a_skip_is_freed_after_its_backward(name: str, recompute: Recompute) -> None:
    alive, most = set[int](), list[int]()

    class Watching(Join):
        def forward(self, value: Travelling, kept: Tensor) -> Travelling:
            if not kept.is_meta and id(kept) not in alive:
                alive.add(id(kept))
                weakref.finalize(kept, alive.discard, id(kept))
                most.append(len(alive))
            return super().forward(value, kept)

    makers = [Embed, Mix, Keep, frozen, Balance, Normalize, Squash, Mix, Watching, Balance, Remember, Head]
    watched = LayerSequence(12, one_by_one(makers), mean_over_valid, valid)
    run(Point(watched, name, recompute, 3, 5, data=sentences))
    assert max(most) == 1, "the last rank has one micro-batch in flight"
    assert not alive


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.norm(self.linear(x))
        return y


NORMALIZED = LayerSequence(8, one_by_one([Normalized] * 7 + [lambda: nn.Linear(6, 3)]), functional.mse_loss)


def statistics(layers: list[nn.Module]) -> dict[str, Tensor]:
    return {f"{i}.{name}": buffer for i, layer in enumerate(layers) for name, buffer in layer.named_buffers()}


def inputs_of_norms(layers: list[nn.Module], x: Tensor, num_micro_batches: int) -> list[list[Tensor]]:
    """Run the plain model on each micro-batch; return what enters each layer's norm."""
    seen: list[list[Tensor]] = [[] for _ in layers[:-1]]
    for piece in x.tensor_split(num_micro_batches):
        for layer, entering in zip(layers[:-1], seen, strict=True):
            entering.append(layer.linear(piece).detach())  # type: ignore[operator]
            piece = layer(piece).detach()
    return seen


def train_normalized(name: str, recompute: Recompute, num_ranks: int, deferred: bool) -> Outcome:
    point = Point(NORMALIZED, name, recompute, num_ranks, 4, data=points_in_space, deferred=deferred)
    return run(point, 2, train=True, optimizer=OptimizerConfig(name="sgd", lr=0.0))


@every_schedule
@every_recompute
@up_to_four_ranks
def test_deferred_statistics_are_those_of_the_whole_mini_batch_once_a_step(
    name: str, recompute: Recompute, num_ranks: int
) -> None:
    outcome = train_normalized(name, recompute, num_ranks, deferred=True)
    layers, _ = build(NORMALIZED)
    means, variances = [torch.zeros(6)] * 7, [torch.ones(6)] * 7
    for step in range(2):
        entering = inputs_of_norms(layers, points_in_space(step, 11).inputs, 4)  # type: ignore[arg-type]
        whole = [torch.cat(pieces) for pieces in entering]
        means = [0.7 * mean + 0.3 * x.mean(0) for mean, x in zip(means, whole, strict=True)]
        variances = [0.7 * variance + 0.3 * x.var(0) for variance, x in zip(variances, whole, strict=True)]
    found = statistics(outcome.layers)
    for index, (mean, variance) in enumerate(zip(means, variances, strict=True)):
        torch.testing.assert_close(found[f"{index}.norm.running_mean"], mean, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found[f"{index}.norm.running_var"], variance, atol=1e-6, rtol=1e-5)
        assert int(found[f"{index}.norm.num_batches_tracked"]) == 2


@every_recompute
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_v"])
def test_statistics_by_micro_batch_are_those_of_a_plain_loop(name: str, recompute: Recompute) -> None:
    outcome = train_normalized(name, recompute, 3, deferred=False)
    layers, _ = build(NORMALIZED)
    for step in range(2):
        for piece in points_in_space(step, 11).inputs.tensor_split(4):  # type: ignore[union-attr]
            for layer in layers:
                piece = layer(piece)
    assert_close(statistics(outcome.layers), statistics(layers), within=1e-6)


def test_adding_gradients_up_leaves_deferred_statistics_alone() -> None:
    outcome = run(Point(NORMALIZED, "1f1b", Recompute.ALWAYS, 2, 4, data=points_in_space))
    assert_identical(statistics(outcome.layers), statistics(build(NORMALIZED)[0]))


Freeze = Callable[[list[nn.Module]], None]


@every_schedule
@pytest.mark.parametrize("num_frozen", [3, 6, 8])
def test_frozen_layers_get_no_gradient_and_those_after_them_the_right_one(name: str, num_frozen: int) -> None:
    """Whole stages at the beginning have nothing to learn, and with all frozen nobody has."""

    def freeze(layers: list[nn.Module]) -> None:
        for layer in layers[:num_frozen]:
            layer.requires_grad_(False)

    outcome = run(Point(NORMALIZED, name, Recompute.EXCEPT_LAST, 3, 4, data=points_in_space), prepare=freeze)
    layers, _ = build(NORMALIZED)
    freeze(layers)
    batch = points_in_space(0, 11)
    for x, target in zip(batch.inputs.tensor_split(4), batch.targets.tensor_split(4), strict=True):  # type: ignore[union-attr]
        size = len(x)
        for layer in layers:
            x = layer(x)
        loss = functional.mse_loss(x, target) * size / 11
        if loss.requires_grad:
            loss.backward()
    assert all(p.grad is None for layer in outcome.layers[:num_frozen] for p in layer.parameters())
    assert_close(gradients(outcome.layers[num_frozen:]), gradients(layers[num_frozen:]))


TIED = replace(TRANSFORMER, layers=5, tied=True)


@cache
def trained_with_one_table() -> dict[str, Tensor]:
    """Two steps of plain PyTorch, in which embedding and head share a parameter."""
    layers, loss_of = build(TIED)
    assert layers[-1].project.weight is layers[0].token.weight
    parameters_once = nn.ModuleList(layers).parameters()
    optimizer = torch.optim.SGD(parameters_once, lr=0.1)
    for step in range(2):
        plain_backward(layers, loss_of, mini_batch(TIED, step), 4, step)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(layers)


@every_schedule
@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS, Recompute.LAYER])
@up_to_four_ranks
def test_tied_tables_stay_one_table_on_every_schedule(name: str, recompute: Recompute, num_ranks: int) -> None:
    outcome = run(Point(TIED, name, recompute, num_ranks, 4), 2, train=True)
    found = parameters(outcome.layers)
    assert_close(found, trained_with_one_table())
    assert torch.equal(found["0.token.weight"], found["11.project.weight"])
