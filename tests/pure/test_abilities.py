"""What an engine cannot do is said in one line before anything starts."""

from dataclasses import replace

import pytest

from pipebench.compose import compose_grid
from pipebench.config import ENGINES, RunConfig, resolve
from pipebench.machine import Machine
from pipebench.peers.abilities import threads_each, why_not, why_not_model
from pipebench.record import LayerProfile

TWO_CORES = Machine(num_cores=2, num_gpus=0)


def point(*overrides: str) -> RunConfig:
    grid = compose_grid(overrides)
    assert grid is not None
    return resolve(grid.points[0], TWO_CORES)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
@pytest.mark.parametrize("micro", ["4", "5"])
def test_the_built_in_engine_can_do_everything(schedule: str, recompute: str, micro: str) -> None:
    assert why_not(point(f"schedule={schedule}", f"recompute={recompute}", f"micro={micro}"), TWO_CORES) == ""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped_bfs", "interleaved"])
@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_torch_recomputes_where_the_backward_is_one_piece(schedule: str, recompute: str) -> None:
    assert why_not(point("engine=torch", f"schedule={schedule}", f"recompute={recompute}"), TWO_CORES) == ""


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            "engine=torch schedule=naive",
            "engine=torch has gpipe, 1f1b, looped_bfs, interleaved, zb_h1, zb_v, not schedule=naive",
        ),
        (
            "engine=torch schedule=1f1b stages=4 micro=2",
            "engine=torch schedule=1f1b wants at least as many micro-batches as stages: micro=2 with stages=4",
        ),
        (
            "engine=torch schedule=interleaved stages=3 micro=11 batch=22",
            "engine=torch schedule=interleaved wants micro // stages groups of equal size: micro=11 with stages=3",
        ),
        (
            "engine=torch schedule=zb_v recompute=always",
            "engine=torch recomputes a stage many times over in a split backward: schedule=zb_v",
        ),
        (
            "engine=torch micro=5",
            "engine=torch wants equal micro-batches: micro=5 does not divide batch=32",
        ),
        (
            "engine=single stages=1 evaluate_every=5",
            "engine=single evaluates nothing: evaluate_every=5, and it wants 0",
        ),
        ("engine=torch save=true", "engine=torch neither saves nor loads: save=True; pipebench and single do"),
        (
            "engine=torch optimizer.clip_norm=1",
            "engine=torch updates without optimizer.clip_norm=1.0: pipebench and single have it",
        ),
        (
            "engine=ddp optimizer.accumulate=2",
            "engine=ddp updates without optimizer.accumulate=2: pipebench and single have it",
        ),
        (
            "engine=fsdp optimizer.lr_schedule=cosine optimizer.lr_decay=9",
            "engine=fsdp updates without optimizer.lr_schedule=cosine: pipebench and single have it",
        ),
        (
            "engine=torch precision=fp16 optimizer.loss_scale=dynamic",
            "engine=torch scales no loss, as precision=fp16 wants: pipebench and single do",
        ),
        ("engine=single", "engine=single is one process without a pipeline: stages=2, and it wants 1"),
        (
            "engine=single stages=1 schedule=naive",
            "engine=single runs no pipeline schedule: schedule=naive, and it wants gpipe",
        ),
        ("engine=ddp schedule=1f1b", "engine=ddp runs no pipeline schedule: schedule=1f1b, and it wants gpipe"),
        (
            "engine=ddp stages=4 micro=3",
            "engine=ddp wants a micro-batch or more for each of its ranks: micro=3, stages=4",
        ),
        ("engine=fsdp schedule=zb_h1", "engine=fsdp runs no pipeline schedule: schedule=zb_h1, and it wants gpipe"),
        (
            "engine=fsdp micro=5",
            "engine=fsdp wants equally many micro-batches on each of its ranks: micro=5, stages=2",
        ),
        ("engine=deepspeed schedule=gpipe", "engine=deepspeed has 1f1b, not schedule=gpipe"),
        (
            "engine=torch recompute=budget recompute_budget=1",
            "engine=torch holds what its own order wants, for which no budget is worked out: recompute=budget",
        ),
        (
            "engine=ddp recompute=budget recompute_budget=1",
            "engine=ddp holds one micro-batch, for which no budget is worked out: recompute=budget",
        ),
        (
            "engine=torchgpipe recompute=layer",
            "engine=torchgpipe recomputes never, except_last or always, not recompute=layer",
        ),
        (
            "engine=deepspeed schedule=1f1b recompute=except_last",
            "engine=deepspeed recomputes never or always, not recompute=except_last",
        ),
        (
            "engine=deepspeed schedule=1f1b micro=5",
            "engine=deepspeed wants equal micro-batches: micro=5 does not divide batch=32",
        ),
        ("engine=torchgpipe schedule=1f1b", "engine=torchgpipe has gpipe, not schedule=1f1b"),
        (
            "engine=torchgpipe batch=10 micro=4",
            "engine=torchgpipe cuts batch=10 into [3, 3, 3, 1], not [3, 3, 2, 2]",
        ),
    ],
)
def test_what_another_engine_cannot_do_has_its_reason(overrides: str, reason: str) -> None:
    assert why_not(point("stages=2", *overrides.split()), TWO_CORES) == reason


PLAIN_LAYERS = LayerProfile(1, ["Linear"], [], [], [], [], [4], [0], [0], [4], [True])


@pytest.mark.parametrize(
    ("layers", "lacking", "engines"),
    [
        (replace(PLAIN_LAYERS, skips=[[0, 2, 64]]), "tensors that skip layers", "torch deepspeed torchgpipe"),
        (replace(PLAIN_LAYERS, ties=[[0, 3]]), "parameters that layers share", "torch deepspeed fsdp"),
        (replace(PLAIN_LAYERS, takes_tuple=True), "layers that take several tensors", "torch deepspeed torchgpipe"),
        (replace(PLAIN_LAYERS, adds_to_loss=True), "losses of inner layers", "torch deepspeed torchgpipe"),
        (
            replace(PLAIN_LAYERS, uneven_loss=True),
            "a loss in which samples count differently",
            "torch deepspeed torchgpipe",
        ),
        (PLAIN_LAYERS, "", ""),
    ],
)
def test_an_engine_that_would_train_a_model_wrong_says_why_it_does_not(
    layers: LayerProfile, lacking: str, engines: str
) -> None:
    config = point()
    for engine in ENGINES:
        said = why_not_model(replace(config, engine=engine), layers)
        unable = engine in engines.split()
        assert said == (f"engine={engine} has no way for {lacking}: model=transformer" if unable else "")


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
@pytest.mark.parametrize("overrides", ["engine=single stages=1 micro=5", "engine=ddp micro=5", "engine=fsdp micro=4"])
def test_what_needs_no_pipeline_takes_ragged_batches_and_every_recompute(overrides: str, recompute: str) -> None:
    config = point("stages=2", "batch=13", *overrides.split(), f"recompute={recompute}")
    assert why_not(config, TWO_CORES) == ""


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ranks_with_all_layers_want_a_gpu_each(engine: str) -> None:
    one_gpu = Machine(num_cores=2, num_gpus=1)
    grid = compose_grid(["stages=2", f"engine={engine}", "device=cuda"])
    assert grid is not None
    reason = f"engine={engine} wants a GPU for each rank: stages=2, and there are 1"
    assert why_not(resolve(grid.points[0], one_gpu), one_gpu) == reason


@pytest.mark.parametrize(
    ("overrides", "package"), [("engine=deepspeed schedule=1f1b", "deepspeed"), ("engine=torchgpipe", "torchgpipe")]
)
def test_a_peer_that_is_not_installed_is_skipped_with_the_command_that_installs_it(
    overrides: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(found: bool) -> str:
        monkeypatch.setattr("pipebench.peers.abilities.find_spec", lambda name: object() if found else None)
        return why_not(point("stages=2", *overrides.split()), TWO_CORES)

    assert installed(False) == f"{package} is not installed: pip install 'pipebench[peers]'"
    assert installed(True) == ""


@pytest.mark.parametrize(("engine", "threads"), [("pipebench", 3), ("torchgpipe", 6)])
def test_one_process_that_runs_all_stages_has_the_threads_of_all(engine: str, threads: int) -> None:
    assert threads_each(point(f"engine={engine}", "stages=2", "threads=3")) == threads
