"""The engines without a pipeline: who takes which micro-batch, and one process against plain PyTorch."""

import dataclasses
from itertools import chain

import pytest
import torch
from in_process import InProcessTransport, World
from plain import MLP, MODELS, SEED, TRANSFORMER, assert_identical, build, gradients, mini_batch, plain_backward
from ranks import CPU, alone, sgd, unseen
from torch import nn

from pipebench.compose import compose_grid
from pipebench.config import RunConfig
from pipebench.engine.stage import Loss, Stage
from pipebench.engine.stopwatch import HostStopwatch
from pipebench.errors import StageError
from pipebench.peers.protocol import Parts
from pipebench.peers.single import SingleProcess
from pipebench.peers.whole_model import WholeModel, micro_batches_of_rank
from pipebench.schedule.catalogue import build as build_schedule


def config(micro: int, recompute: str = "never") -> RunConfig:
    grid = compose_grid([f"micro={micro}", f"recompute={recompute}", "batch=11", "stages=1", "engine=single"])
    assert grid is not None
    return grid.points[0]


def single(model: str, micro: int, recompute: str) -> SingleProcess:
    layers, loss = build(MODELS[model])
    stages = {0: Stage(layers, 0, SEED, CPU, None, Loss(loss))}
    schedule, transport = build_schedule("gpipe", 1, micro), InProcessTransport(World(), 0)
    around = (sgd, alone(), transport, HostStopwatch(), unseen(), lambda sizes: {})
    return SingleProcess(Parts(config(micro, recompute), schedule, 0, CPU, stages, {}, *around))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [5, 7, 11])
def test_ranks_share_all_micro_batches_out_in_order_and_evenly(micro: int, num_ranks: int) -> None:
    batch = mini_batch(TRANSFORMER)
    shares = [micro_batches_of_rank(config(micro), batch, rank, num_ranks) for rank in range(num_ranks)]
    everything = list(chain.from_iterable(shares))
    assert [each.index for each in everything] == list(range(micro))
    assert torch.equal(torch.cat([each.inputs for each in everything]), batch.inputs)
    assert torch.equal(torch.cat([each.targets for each in everything]), batch.targets)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sum(each.share for each in everything) == pytest.approx(1)


def test_except_last_leaves_out_the_last_micro_batch_of_each_rank() -> None:
    for recompute, expected in {
        "never": [[False, False, False], [False, False]],
        "except_last": [[True, True, False], [True, False]],
        "always": [[True, True, True], [True, True]],
    }.items():
        shares = [micro_batches_of_rank(config(5, recompute), mini_batch(TRANSFORMER), rank, 2) for rank in range(2)]
        assert [[each.recomputed for each in share] for share in shares] == expected


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
@pytest.mark.parametrize("micro", [1, 3, 4])
@pytest.mark.parametrize("model", ["transformer", "mlp"])
def test_one_process_has_the_gradients_and_the_loss_of_plain_pytorch(model: str, micro: int, recompute: str) -> None:
    layers, loss = build(MODELS[model])
    batch = mini_batch(MODELS[model])
    expected_loss = plain_backward(layers, loss, batch, micro, step=4)
    engine = single(model, micro, recompute)
    outcome = engine.accumulate(4, batch)
    assert outcome.loss == pytest.approx(expected_loss)
    assert_identical(gradients(list(engine.layers.values())), gradients(layers))


def test_one_process_tells_what_it_did_one_micro_batch_after_the_other() -> None:
    engine = single("mlp", 3, "always")
    told = {
        "0F0 0B0 0F1 0B1 0F2 0B2": engine.accumulate(0, mini_batch(MODELS["mlp"])).spans(),
        "0F0 0B0 0F1 0B1 0F2 0B2 0O": engine.train(0, mini_batch(MODELS["mlp"])).spans(),
    }
    for expected, spans in told.items():
        assert " ".join(str(span.action) for span in spans) == expected
        assert all(0 < span.start_s <= span.end_s for span in spans)


def test_training_moves_the_weights_and_drops_the_gradients() -> None:
    engine = single("mlp", 3, "never")
    before = [p.detach().clone() for layer in engine.layers.values() for p in layer.parameters()]
    engine.train(0, mini_batch(MODELS["mlp"]))
    after = [p for layer in engine.layers.values() for p in layer.parameters()]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


def test_a_failure_names_the_action() -> None:
    engine = single("mlp", 3, "never")
    with pytest.raises(StageError, match="rank 0 failed at 0F0: "):
        engine.train(0, mini_batch(TRANSFORMER))


MSE = Loss(nn.functional.mse_loss)


class _Counting(nn.Linear):
    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(x)


@pytest.mark.parametrize(("recompute", "forwards"), [("never", 4), ("except_last", 7), ("always", 8)])
def test_recomputed_micro_batches_run_their_forward_again(recompute: str, forwards: int) -> None:
    layers = [_Counting(4, 4), _Counting(4, 4)]
    stages = {
        number: Stage([layer], number, SEED, CPU, None, MSE if number else None) for number, layer in enumerate(layers)
    }
    model, batch = WholeModel(stages), mini_batch(MODELS["mlp"])
    batch.inputs.resize_(11, 4)
    for micro_batch in micro_batches_of_rank(config(4, recompute), batch, 0, 1):
        model(0, micro_batch).backward()
    assert [layer.forwards for layer in layers] == [forwards, forwards]


@pytest.mark.parametrize("deferred", [True, False])
def test_a_recompute_moves_no_statistics_of_batch_norm(deferred: bool) -> None:
    def moved(recompute: str) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        layers = [nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)]
        cut = (Stage(layers[:1], 0, SEED, CPU, None, None, False, deferred), Stage(layers[1:], 1, SEED, CPU, None, MSE))
        batch = mini_batch(MODELS["mlp"])
        for micro_batch in micro_batches_of_rank(config(4, recompute), batch, 0, 1):
            WholeModel(dict(enumerate(cut)))(0, micro_batch).backward()
        cut[0].batch_norms.commit()
        return list(cut[0].module.buffers())

    for plain, recomputed in zip(moved("never"), moved("always"), strict=True):
        assert torch.equal(plain, recomputed)
        assert float(plain.abs().sum()) > 0


def test_one_process_moves_deferred_statistics_once_a_step_and_not_when_it_only_accumulates() -> None:
    layers, loss = build(dataclasses.replace(MLP, norm="batch"))
    around = (sgd, alone(), InProcessTransport(World(), 0), HostStopwatch(), unseen(), lambda sizes: {})
    stages = {0: Stage(layers, 0, SEED, CPU, None, Loss(loss))}
    engine = SingleProcess(Parts(config(4, "always"), build_schedule("gpipe", 1, 4), 0, CPU, stages, {}, *around))
    engine.accumulate(0, mini_batch(MLP))
    assert [int(layer.norm.num_batches_tracked) for layer in layers[1:-1]] == [0, 0, 0]
    engine.train(0, mini_batch(MLP))
    assert [int(layer.norm.num_batches_tracked) for layer in layers[1:-1]] == [1, 1, 1]
    assert all(float(layer.norm.running_mean.abs().sum()) > 0 for layer in layers[1:-1])
