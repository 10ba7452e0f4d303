"""torchgpipe in one process against plain PyTorch; skipped where it is not installed."""

import pytest
import torch
from in_process import InProcessTransport, World
from plain import (
    MODELS,
    SEED,
    TRANSFORMER,
    assert_close,
    build,
    gradients,
    mini_batch,
    parameters,
    plain_backward,
)
from ranks import CPU, alone, sgd, unseen

from pipebench.compose import compose_grid
from pipebench.config import RunConfig
from pipebench.engine.partition import split_uniformly
from pipebench.engine.stage import Loss, Stage
from pipebench.engine.stopwatch import HostStopwatch
from pipebench.harness.memory import measure_memory
from pipebench.peers.protocol import Parts
from pipebench.schedule.catalogue import build as build_schedule

torchgpipe_threads = pytest.importorskip(
    "pipebench.peers.torchgpipe_threads", reason="torchgpipe is not installed", exc_type=ImportError
)

NUM_SAMPLES = 12


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> object:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def config(stages: int, micro: int, recompute: str) -> RunConfig:
    grid = compose_grid(
        [f"stages={stages}", f"micro={micro}", f"recompute={recompute}", "threads=1", "engine=torchgpipe"]
    )
    assert grid is not None
    return grid.points[0]


def engine(model: str, stages: int, micro: int, recompute: str = "never") -> torchgpipe_threads.TorchGPipe:
    layers, loss = build(MODELS[model])
    counts = split_uniformly(len(layers), stages)
    cut = {}
    for number, count in enumerate(counts):
        first = sum(counts[:number])
        is_last = number == stages - 1
        cut[number] = Stage(layers[first : first + count], first, SEED, CPU, None, Loss(loss) if is_last else None)
    around = (sgd, alone(), InProcessTransport(World(), 0), HostStopwatch(), unseen(), lambda sizes: {})
    schedule = build_schedule("gpipe", stages, micro)
    return torchgpipe_threads.build(Parts(config(stages, micro, recompute), schedule, 0, CPU, cut, {}, *around))


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (3, 6)])
@pytest.mark.parametrize("model", ["transformer", "mlp"])
def test_it_has_the_gradients_and_the_loss_of_plain_pytorch(
    model: str, stages: int, micro: int, recompute: str
) -> None:
    layers, loss = build(MODELS[model])
    batch = mini_batch(MODELS[model], num_samples=NUM_SAMPLES)
    expected = plain_backward(layers, loss, batch, micro, step=4)
    pipe = engine(model, stages, micro, recompute)
    outcome = pipe.accumulate(4, batch)
    assert outcome.loss == pytest.approx(expected)
    assert outcome.spans() == ()
    assert_close(gradients(list(pipe.layers.values())), gradients(layers))


@pytest.mark.parametrize("recompute", ["never", "except_last"])
def test_it_trains_as_plain_pytorch_does(recompute: str) -> None:
    layers, loss = build(TRANSFORMER)
    optimizer = sgd([parameter for layer in layers for parameter in layer.parameters()])
    pipe = engine("transformer", 2, 4, recompute)
    for step in range(3):
        batch = mini_batch(TRANSFORMER, step, NUM_SAMPLES)
        expected = plain_backward(layers, loss, batch, 4, step)
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.train(step, batch).loss == pytest.approx(expected)
    assert_close(parameters(list(pipe.layers.values())), parameters(layers))


def test_what_its_threads_allocate_counts_as_memory() -> None:
    """A forward keeps every activation without recompute, and less with it."""

    num_samples, width, num_residuals, bytes_each = 1024, 16, 3, 4

    def activations(recompute: str) -> int:
        pipe = engine("mlp", 2, 4, recompute)
        batch = mini_batch(MODELS["mlp"], num_samples=num_samples)
        pipe.accumulate(0, batch)
        own = [parameter for layer in pipe.layers.values() for parameter in layer.parameters()]
        return measure_memory(lambda: pipe.accumulate(1, batch), own, [], 0, CPU).activations_bytes

    kept = 3 * num_residuals * num_samples * width * bytes_each  # what a norm, a gelu and a linear layer are given
    assert activations("never") > kept > activations("always")
