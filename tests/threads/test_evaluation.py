"""Forwards alone between training steps: the loss and metrics of plain PyTorch in eval mode, and nothing disturbed.

The oracle is the model as one nn.Sequential, given the whole batch at once.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from plain import CLASSIFIER, MLP, TRANSFORMER, Model, assert_identical, mini_batch, parameters, sequence_of
from ranks import Evaluation, Outcome, Point, run
from torch import Tensor, nn
from torch.nn import functional

from pipebench.compose import compose_grid
from pipebench.config import MOST_STEPS, OptimizerConfig
from pipebench.data import EVALUATION_STEP, batches, evaluation_batch
from pipebench.data.batch import MiniBatch
from pipebench.engine.microbatch import passes_of
from pipebench.models.layers import LayerSequence, one_by_one
from pipebench.schedule.builders import Recompute

IGNORED = -100


def with_batch_norm() -> LayerSequence:
    makers: list[Callable[[], nn.Module]] = [
        partial(nn.Linear, 8, 16),
        partial(nn.BatchNorm1d, 16),
        nn.ReLU,
        partial(nn.Dropout, 0.3),
        partial(nn.Linear, 16, 4),
    ]
    return LayerSequence(len(makers), one_by_one(makers), functional.mse_loss)


def masked() -> LayerSequence:
    """A classifier whose loss leaves some samples out, so that a mean over samples would be another."""
    makers: list[Callable[[], nn.Module]] = [partial(nn.Linear, 8, 16), nn.Tanh, partial(nn.Linear, 16, 4)]

    def hits(scores: Tensor, targets: Tensor) -> Tensor:
        return (scores.argmax(1) == targets)[targets != IGNORED].float().mean()

    def count(targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    return LayerSequence(len(makers), one_by_one(makers), functional.cross_entropy, count, {"hits": hits})


def numbers(step: int, num_samples: int) -> MiniBatch:
    generator = torch.Generator().manual_seed(step)
    return MiniBatch(torch.randn(num_samples, 8, generator=generator), torch.randn(num_samples, 4, generator=generator))


def classes(step: int, num_samples: int) -> MiniBatch:
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(4, (num_samples,), generator=generator)
    targets[num_samples // 2 :: 2] = IGNORED
    return MiniBatch(torch.randn(num_samples, 8, generator=generator), targets)


def plain_evaluation(layers: list[nn.Module], model: Model | LayerSequence, batch: MiniBatch) -> Evaluation:
    sequence = sequence_of(model)
    with torch.no_grad():
        output = nn.Sequential(*layers).eval()(batch.inputs)
        metrics = {name: float(mean(output, batch.targets)) for name, mean in sequence.metrics.items()}
        return Evaluation(float(sequence.loss(output, batch.targets)), metrics)


def buffers(layers: list[nn.Module]) -> dict[str, Tensor]:
    return {f"{i}.{name}": b.clone() for i, layer in enumerate(layers) for name, b in layer.named_buffers()}


def assert_as_plain(outcome: Outcome, model: Model | LayerSequence, batches: Sequence[MiniBatch]) -> None:
    """Compare the evaluations after the last step, when the weights were what they are now."""
    for found, batch in zip(outcome.evaluations[-len(batches) :], batches, strict=True):
        expected = plain_evaluation(outcome.layers, model, batch)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5), len(batch)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5), len(batch)


ANY_SIZE = [1, 11, 12, 13, 30]
"""With 11 samples in three micro-batches the largest has 4: less than one, whole ones, a pass, and several, ragged."""


@pytest.mark.parametrize("model", [TRANSFORMER, CLASSIFIER, MLP], ids=["transformer", "classifier", "mlp"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_an_evaluation_of_any_size_is_that_of_the_whole_model_at_once(model: Model, stages: int) -> None:
    batches = [mini_batch(model, 100 + size, size) for size in ANY_SIZE]
    assert_as_plain(run(Point(model, "1f1b", num_stages=stages), 1, train=True, evaluated=batches), model, batches)


@pytest.mark.parametrize("name", ["naive", "gpipe", "interleaved", "looped_bfs", "zb_h1", "zb_v", "v_min"])
def test_every_schedule_evaluates(name: str) -> None:
    chunks = 2 if name in ("interleaved", "looped_bfs") else None
    batches = [mini_batch(TRANSFORMER, 100 + size, size) for size in (13, 2)]
    point = Point(TRANSFORMER, name, num_stages=2, chunks=chunks)
    assert_as_plain(run(point, 1, train=True, evaluated=batches), TRANSFORMER, batches)


def test_batch_norm_evaluates_by_its_running_statistics() -> None:
    model, batches = with_batch_norm(), [numbers(100, 5), numbers(101, 30)]
    for deferred in (True, False):
        point = Point(model, "1f1b", num_stages=3, data=numbers, deferred=deferred)
        assert_as_plain(run(point, 2, train=True, evaluated=batches), model, batches)


def test_loss_and_metrics_are_means_over_what_the_loss_counts() -> None:
    model, batches = masked(), [classes(100, 9), classes(101, 31)]
    assert_as_plain(run(Point(model, "1f1b", data=classes), 1, train=True, evaluated=batches), model, batches)


@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS])
@pytest.mark.parametrize("deferred", [True, False])
def test_training_is_bit_equal_with_and_without_evaluations_between(recompute: Recompute, deferred: bool) -> None:
    model = with_batch_norm()
    point = Point(model, "1f1b", recompute, num_stages=3, data=numbers, deferred=deferred)

    def trained(evaluated: Sequence[MiniBatch]) -> Outcome:
        return run(
            point, 4, True, OptimizerConfig(name="adam", lr=0.001), prepare=lambda layers: None, evaluated=evaluated
        )

    alone, between = trained([]), trained([numbers(100, 30), numbers(101, 2)])
    assert between.losses == alone.losses
    assert_identical(parameters(between.layers), parameters(alone.layers))
    assert_identical(buffers(between.layers), buffers(alone.layers))
    assert all(parameter.grad is None for layer in between.layers for parameter in layer.parameters())
    assert all(module.training for layer in between.layers for module in layer.modules())


def test_a_layer_that_never_trains_stays_in_eval_mode() -> None:
    def frozen(layers: list[nn.Module]) -> None:
        layers[3].eval()

    point = Point(with_batch_norm(), "gpipe", data=numbers)
    layers = run(point, 1, True, prepare=frozen, evaluated=[numbers(100, 5)]).layers
    assert [layer.training for layer in layers] == [True, True, True, False, True]


def test_passes_have_no_more_and_no_larger_micro_batches_than_training() -> None:
    for num_samples in range(1, 60):
        passes = passes_of(num_samples, 3, 4)
        assert sum(map(sum, passes)) == num_samples
        assert all(len(sizes) == 3 and set(sizes) == {4} for sizes in passes[:-1])
        assert len(passes[-1]) <= 3
        assert set(passes[-1][:-1]) <= {4}
        assert passes[-1][-1] <= 4


def test_evaluation_data_are_of_a_step_that_no_training_reaches() -> None:
    grid = compose_grid(["model=mlp_classifier", "data=teacher", "batch=4", "evaluate_batch=7"])
    assert grid is not None
    batch = evaluation_batch(grid.points[0])
    assert len(batch) == 7
    assert EVALUATION_STEP > 2 * MOST_STEPS
    assert not torch.equal(batch.inputs[:4], batches(grid.points[0])(0).inputs)
