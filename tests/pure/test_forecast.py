"""What a point will need, and whether that is there: by hand, on machines made up."""

from pathlib import Path

import pytest
from test_config import TWO_GPUS, point
from test_costs import LAYERS

from pipebench.harness.forecast import memory_by_process, why_too_large, why_weights_too_large
from pipebench.harness.prepare import Prepared, schedule_of
from pipebench.machine import Capacity, capacity
from pipebench.record import StageMemory

MIB = 2**20
ON_CPU = "stages=4 model=mlp device=cpu threads=1"


def ranks(*mebibytes: int) -> list[StageMemory]:
    return [StageMemory(size * MIB, 0, 0, 0, 0, 0) for size in mebibytes]


@pytest.mark.parametrize(("free", "told"), [(10, ""), (9, "all ranks need at least 10 MiB, 9 MiB of memory is free")])
def test_on_the_cpu_all_ranks_share_the_memory(free: int, told: str) -> None:
    reason = why_too_large(point(ON_CPU), ranks(1, 2, 3, 4), Capacity(free * MIB, []))
    assert reason.partition(" (")[0] == told


@pytest.mark.parametrize(("optimizer", "needed"), [("sgd", 20), ("adam", 40)])
def test_weights_alone_are_too_large_however_they_are_cut(optimizer: str, needed: int) -> None:
    config = point(f"{ON_CPU} optimizer={optimizer}")
    for free, told in ((needed, ""), (needed - 1, f"optimizer alone, need at least {needed} MiB, {needed - 1} MiB of")):
        reason = why_weights_too_large(config, 10 * MIB, Capacity(free * MIB, []))
        assert told in reason
        assert bool(told) == bool(reason)


def test_where_nothing_tells_what_is_free_everything_may_run() -> None:
    assert why_too_large(point(ON_CPU), ranks(1, 2, 3, 4), Capacity(None, [])) == ""


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([5, 6], ""),
        ([3, 6], "the ranks on GPU 0 need at least 4 MiB, 3 MiB of memory on it is free"),
        ([4, 5], "the ranks on GPU 1 need at least 6 MiB, 5 MiB of memory on it is free"),
    ],
)
def test_ranks_go_round_the_gpus(sizes: list[int], told: str) -> None:
    config = point("stages=4 model=mlp device=cuda threads=1", TWO_GPUS)
    reason = why_too_large(config, ranks(1, 2, 3, 4), Capacity(0, [size * MIB for size in sizes]))
    assert reason.partition(" (")[0] == told


def test_a_simulated_point_needs_no_memory() -> None:
    config = point("engine=simulate model=synthetic stages=2 threads=1")
    assert why_too_large(config, ranks(1000), Capacity(0, [])) == ""


def needed(overrides: str, *layers_per_stage: int) -> list[tuple[int, int, int, int]]:
    """Return what each process needs of `LAYERS`: parameters, gradients, optimizer state and activations."""
    config = point(f"model=mlp threads=1 optimizer=adam batch=8 {overrides}")
    memory = memory_by_process(config, LAYERS, Prepared(list(layers_per_stage), schedule_of(config)))
    return [(m.parameters_bytes, m.gradients_bytes, m.optimizer_bytes, m.activations_bytes) for m in memory]


def test_one_process_needs_all_layers_and_one_micro_batch() -> None:
    full = 100 + 200 + 300 + 16
    assert needed("engine=single stages=1 micro=4", 3) == [(60, 60, 120, full)]
    assert needed("engine=pipebench stages=1 micro=4", 3) == [(60, 60, 120, 4 * full)]


def test_each_rank_of_ddp_needs_that_and_a_rank_of_fsdp_its_share_of_the_weights() -> None:
    full = 100 + 200 + 300 + 16
    assert needed("engine=ddp stages=2 micro=4", 2, 1) == [(60, 60, 120, full)] * 2
    assert needed("engine=fsdp stages=2 micro=4", 2, 1) == [(30, 30, 60, full)] * 2


def test_with_recompute_a_rank_with_all_layers_holds_one_stage_of_a_micro_batch() -> None:
    [first, second] = needed("engine=ddp stages=2 micro=4 recompute=always", 2, 1)
    assert first == second == (60, 60, 120, max(100 + 200 + 16, 300 + 24))


def machine_with(root: Path, limit: str) -> Path:
    """Return the root of a machine with 100 MiB available, in a control group that uses 30 MiB, 5 of them cache."""
    for name, text in {
        "proc/meminfo": "MemTotal: 204800 kB\nMemAvailable: 102400 kB\nHugePages_Total: 0\n",
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": limit,
        "sys/fs/cgroup/job/memory.current": str(30 * MIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {5 * MIB}\n",
        "sys/fs/cgroup/job/step/memory.max": "max",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("limit", "free"), [("max", 100), (str(50 * MIB), 25), (str(500 * MIB), 100), ("0", 0)])
def test_memory_is_what_the_kernel_and_every_limit_above_leave(limit: str, free: int, tmp_path: Path) -> None:
    assert capacity(machine_with(tmp_path, limit)).memory_bytes == free * MIB


def test_a_machine_that_tells_nothing_has_unknown_memory(tmp_path: Path) -> None:
    assert capacity(tmp_path).memory_bytes is None
