"""Command lines: what they become, and the one line that answers a bad one."""

import copy
import dataclasses
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipebench.cli import defined_points
from pipebench.compose import Grid, compose_grid
from pipebench.config import (
    ENGINES,
    RESOLVED_BY_THE_MACHINE,
    RunConfig,
    key_of,
    ranks_per_device,
    resolve,
    value_at,
)
from pipebench.errors import ConfigError, ScheduleError
from pipebench.machine import Machine
from pipebench.record import config_from, read_result
from pipebench.schedule.builders import SCHEDULES
from pipebench.schedule.catalogue import ZB_AUTO

ROOT = Path(__file__).resolve().parents[2]
TWO_CORES = Machine(num_cores=2, num_gpus=0)
TWO_GPUS = Machine(num_cores=8, num_gpus=2)
EXPERIMENTS = sorted(path.stem for path in (ROOT / "experiments").glob("*.yaml"))
TOP_LEVEL_KEYS = [entry.name for entry in dataclasses.fields(RunConfig)]


@cache
def points_of(command_line: str, machine: Machine = TWO_CORES) -> list[RunConfig]:
    grid = compose_grid(shlex.split(command_line))
    assert grid is not None
    return [resolve(point, machine) for point in grid.points]


def point(command_line: str = "", machine: Machine = TWO_CORES) -> RunConfig:
    [only] = points_of(command_line, machine)
    return only


def changed(config: RunConfig, **values: Any) -> RunConfig:
    """Return a copy with `model__width=8` and the like written in, past Hydra, which takes a third of a second."""
    result = copy.deepcopy(config)
    for key, value in values.items():
        *groups, name = key.split("__")
        owner: Any = result
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, name, value)
    return result


SCHEDULE_NAMES = ", ".join([*SCHEDULES, ZB_AUTO])
MODELS = "custom, gpt2_small, hf, mlp, mlp_batch_norm, mlp_classifier, synthetic, transformer, transformer_l, u_mlp"


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        # keys
        ("stagess=2", "stagess=2: unknown key 'stagess' (did you mean 'stages'?); --help lists the keys"),
        ("+microo=4", "+microo=4: unknown key 'microo' (did you mean 'micro'?); --help lists the keys"),
        ("++qqq=4", "++qqq=4: unknown key 'qqq'; --help lists the keys"),
        ("model.hads=4", "model.hads=4: unknown key 'model.hads' (did you mean 'model.heads'?); --help lists the keys"),
        ("model=mlp model.heads=4", "model.heads=4: Key 'heads' not in 'MlpConfig'"),
        ("~stages", "~stages: expected KEY=VALUE; a key cannot be taken away"),
        ("stages", "stages: cannot be read: expected KEY=VALUE"),
        # names
        ("schedule=gpip", f"schedule=gpip: expected one of {SCHEDULE_NAMES}, a .csv file (did you mean 'gpipe'?)"),
        ("recompute=true", "recompute=True: expected one of never, except_last, always, layer, selective, budget"),
        ("model=mlpp", f"model=mlpp: expected one of {MODELS} (did you mean 'mlp'?)"),
        ("optimizer=sgdd", "optimizer=sgdd: expected one of adam, adamw, sgd (did you mean 'sgd'?)"),
        ("data=teacher", "data=teacher: expected text or custom for model=transformer"),
        ("model=mlp data=text", "data=text: expected teacher or custom for model=mlp"),
        # users' own
        ("model=custom model.arguments=3", "model.arguments=3: expected names with values, such as {width: 64}"),
        (
            "model=mlp model.arguments.width=3",
            "model.arguments.width=3: expected model=custom, whose arguments are yours to name",
        ),
        (
            "model=custom model.num_layers=3",
            "model.num_layers=3: unknown key 'model.num_layers' (did you mean 'model.layers'?); --help lists the keys",
        ),
        ("model=custom", "model.target=null: expected package.module:function"),
        (
            "model=custom model.target=mine",
            "model.target=mine: expected package.module:function, such as mine:model for a function in mine.py",
        ),
        (
            "model=custom model.target=mine:net model.loss=next_tokens",
            "model.loss=next_tokens: expected one of mean_squared_error, cross_entropy, next_token, "
            "package.module:function (did you mean 'next_token'?)",
        ),
        ("model=custom model.target=mine:net", "data.target=null: expected package.module:function"),
        (
            "model=custom model.target=mine:net data=text",
            "data.sequence=null: expected the tokens of a sample, with model=custom",
        ),
        ("data.sequence=65", "data.sequence=65: expected a whole number of at most model.sequence=64"),
        ("model=hf model.name=bert", "model.name=bert: expected one of gpt2, llama"),
        # types
        ("stages=two", "stages=two: expected a whole number"),
        ("stages=2.5", "stages=2.5: expected a whole number"),
        ("stages=true", "stages=true: expected a whole number"),
        ("stages=null", "stages=null: expected a value, not null"),
        ("model.layers=x", "model.layers=x: expected a whole number"),
        ("optimizer.lr=fast", "optimizer.lr=fast: expected a number"),
        ("trackers=tensorboard", "trackers=tensorboard: expected a list such as [wandb,tensorboard]"),
        (
            "trackers=wandb,tensorboard",
            "trackers=wandb,tensorboard: expected one value; points cannot differ in trackers alone",
        ),
        (
            "recompute=budget",
            "recompute_budget=None: expected MiB of activations a rank, above 0, with recompute=budget",
        ),
        (
            "recompute_budget=20",
            "recompute_budget=20: expected null with recompute=never: only budget keeps one",
        ),
        (
            "recompute=budget recompute_budget=20 schedule=zb_auto",
            "recompute=budget: expected another setting with schedule=zb_auto, which keeps memory_limit",
        ),
        ("model.attention=flash", "model.attention=flash: expected one of fused, explicit"),
        # a few rules of `resolve`, which the next test holds one by one
        ("stages=0", "stages=0: expected a whole number of at least 1"),
        (
            "partition=[9,8]",
            "partition=[9, 8]: expected 2 counts (stages x chunks) that add up to 18, the layers of model=transformer",
        ),
        ("threads=1.5", "threads=1.5: expected auto or a whole number of at least 1"),
        ("optimizer.lr=nan", "optimizer.lr=nan: expected a number above 0"),
        ("device=cuda", "device=cuda: expected auto or cpu, since this machine shows no CUDA GPU to PyTorch"),
        # sweeps
        ("stages=2,4", "stages=2,4: several values: expected one, or -m on the command line"),
        ("experiment=mlp", "experiment=mlp: sweeps stages, micro, schedule: expected -m on the command line"),
        ("experiment=quik", f"experiment=quik: expected one of {', '.join(EXPERIMENTS)} (did you mean 'quick'?)"),
        (
            "-m stages=interval(1,2)",
            "stages=interval(1,2): expected values such as stages=1,2,4 or stages=range(1,5)",
        ),
        ("-m stages=2,99", "stages=99: expected at most 18, the layers of model=transformer"),
    ],
)  # fmt: skip
def test_a_bad_command_line_is_answered_in_one_line(command_line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        points_of(command_line)
    assert str(caught.value) == message


AT_LEAST_1 = "a whole number of at least 1"
COUNTS_OF_18 = "2 counts (stages x chunks) that add up to 18, the layers of model=transformer"
LIST_OF_COUNTS = "one of time, parameters, uniform, or a list of layer counts of at least 1"


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        # names
        ("transformer", {"engine": "megatron"}, f"engine=megatron: expected one of {', '.join(ENGINES)}"),
        ("transformer", {"precision": "f16"}, "precision=f16: expected one of fp32, bf16, fp16 (did you mean 'fp16'?)"),
        ("transformer", {"device": "tpu"}, "device=tpu: expected one of auto, cpu, cuda (did you mean 'cpu'?)"),
        ("transformer", {"gate": "maybe"}, "gate=maybe: expected one of on, off"),
        ("transformer", {"optimizer__name": "lion"}, "optimizer.name=lion: expected one of sgd, adam, adamw"),
        (
            "transformer",
            {"wandb__mode": "onlin"},
            "wandb.mode=onlin: expected one of offline, online, disabled (did you mean 'online'?)",
        ),
        (
            "transformer",
            {"trackers": ["wandbb"]},
            "trackers=wandbb: expected one of wandb, tensorboard (did you mean 'wandb'?)",
        ),
        ("transformer", {"trackers": ["wandb", "wandb"]}, "trackers=[wandb,wandb]: expected each name once"),
        ("mlp", {"model__task": "rank"}, "model.task=rank: expected one of regression, classification"),
        # values
        ("transformer", {"stages": 0}, f"stages=0: expected {AT_LEAST_1}"),
        ("transformer", {"micro": -1}, f"micro=-1: expected {AT_LEAST_1}"),
        ("transformer", {"batch": 0}, f"batch=0: expected {AT_LEAST_1}"),
        ("transformer", {"steps": 0}, f"steps=0: expected {AT_LEAST_1}"),
        ("transformer", {"warmup": -1}, "warmup=-1: expected a whole number of at least 0"),
        ("transformer", {"evaluate_every": -1}, "evaluate_every=-1: expected a whole number of at least 0"),
        ("mlp", {"evaluate_batch": 0}, f"evaluate_batch=0: expected {AT_LEAST_1}, or null for as many as batch"),
        ("mlp", {"load": "no"}, "load=no: expected null, or a folder that save=true made, with a saved.json"),
        ("transformer", {"repeats": 0}, f"repeats=0: expected {AT_LEAST_1}"),
        ("transformer", {"replicas": 0}, f"replicas=0: expected {AT_LEAST_1}"),
        ("transformer", {"model__layers": 0}, f"model.layers=0: expected {AT_LEAST_1}"),
        ("mlp", {"model__outputs": 0}, f"model.outputs=0: expected {AT_LEAST_1}"),
        ("synthetic", {"model__width": 0}, f"model.width=0: expected {AT_LEAST_1}"),
        (
            "transformer",
            {"data__max_bytes": 0},
            "data.max_bytes=0: expected at least 65, a sample's tokens and one more",
        ),
        (
            "transformer",
            {"replicas": 2},
            "replicas=2: expected 1 (data parallelism beside the pipeline is not built yet)",
        ),
        ("transformer", {"on_failure": "halt"}, "on_failure=halt: expected one of continue, stop"),
        ("transformer", {"point_limit_s": 0}, "point_limit_s=0: expected auto or seconds above 0 and up to 86400"),
        (
            "transformer",
            {"progress_limit_s": "soon"},
            "progress_limit_s=soon: expected auto or seconds above 0 and up to 86400",
        ),
        ("transformer", {"seed": -1}, "seed=-1: expected a whole number from 0 to 2147483647"),
        ("transformer", {"seed": 2**31}, "seed=2147483648: expected a whole number from 0 to 2147483647"),
        ("transformer", {"optimizer__lr": 0.0}, "optimizer.lr=0.0: expected a number above 0"),
        (
            "mlp",
            {"optimizer__weight_decay": -1.0},
            "optimizer.weight_decay=-1.0: expected null or a number of at least 0",
        ),
        ("mlp", {"optimizer__momentum": 0.9}, "optimizer.momentum=0.9: expected 0 with optimizer.name=adamw"),
        ("mlp", {"optimizer__clip_norm": 0.0}, "optimizer.clip_norm=0.0: expected null or a number above 0"),
        (
            "mlp",
            {"optimizer__loss_scale": "big"},
            "optimizer.loss_scale=big: expected null, dynamic or a number above 0",
        ),
        ("mlp", {"optimizer__accumulate": 0}, "optimizer.accumulate=0: expected a whole number of at least 1"),
        ("mlp", {"optimizer__lr_warmup": -1}, "optimizer.lr_warmup=-1: expected a whole number of at least 0"),
        ("mlp", {"optimizer__lr_floor": 2.0}, "optimizer.lr_floor=2.0: expected a number from 0 to 1"),
        (
            "mlp",
            {"optimizer__lr_decay": 9},
            "optimizer.lr_decay=9: expected optimizer.lr_schedule=linear or cosine beside it",
        ),
        (
            "mlp",
            {"optimizer__lr_schedule": "cosine"},
            "optimizer.lr_decay=null: expected a whole number above optimizer.lr_warmup=0",
        ),
        (
            "mlp",
            {"optimizer__lr_schedule": "linear", "optimizer__lr_warmup": 5, "optimizer__lr_decay": 5},
            "optimizer.lr_decay=5: expected a whole number above optimizer.lr_warmup=5",
        ),
        (
            "mlp",
            {"precision": "fp16"},
            "precision=fp16: expected optimizer.loss_scale=dynamic or a number beside it, else gradients vanish",
        ),
        ("mlp", {"optimizer__decay": "none"}, "optimizer.decay=none: expected one of all, matrices"),
        ("transformer", {"model__dropout": 1.0}, "model.dropout=1.0: expected a number from 0 to below 1"),
        ("mlp", {"model__dropout": -0.1}, "model.dropout=-0.1: expected a number from 0 to below 1"),
        ("transformer", {"model__heads": 3}, "model.heads=3: expected a divisor of model.width=128"),
        (
            "transformer",
            {"model__vocabulary": 99},
            "model.vocabulary=99: expected at least 256, since the data are bytes",
        ),
        ("synthetic", {"model__forward_s": -1.0}, "model.forward_s=-1.0: expected seconds from 0 to 60"),
        ("synthetic", {"model__backward_s": 60.0}, "model.backward_s=60.0: expected seconds from 0 to 60"),
        ("synthetic", {"model__weight_share": 1.5}, "model.weight_share=1.5: expected a number from 0 to 1"),
        ("synthetic", {"model__imbalance": -1.0}, "model.imbalance=-1.0: expected a number of at least 0"),
        ("transformer", {"threads": 0}, "threads=0: expected auto or a whole number of at least 1"),
        ("transformer", {"threads": "two"}, "threads=two: expected auto or a whole number of at least 1"),
        ("transformer", {"chunks": 0}, "chunks=0: expected auto or a whole number of at least 1"),
        ("transformer", {"chunks": "two"}, "chunks=two: expected auto or a whole number of at least 1"),
        (
            "transformer",
            {"schedule": "zb_auto", "memory_limit": "-1p"},
            "memory_limit=-1p: expected auto, MiB of activations a rank, or 2p for twice what 1F1B's first rank holds",
        ),
        # what does not fit together
        ("transformer", {"chunks": 2}, "chunks=2: expected 1 with schedule=gpipe"),
        ("transformer", {"schedule": "zb_v", "chunks": 1}, "chunks=1: expected 2 with schedule=zb_v"),
        (
            "transformer",
            {"schedule": "interleaved", "chunks": 10},
            "chunks=10: expected stages x chunks of at most 18, the layers of model=transformer; it is 20",
        ),
        (
            "transformer",
            {"memory_limit": "2p"},
            "memory_limit=2p: expected auto with schedule=gpipe: only zb_auto keeps a limit",
        ),
        (
            "transformer",
            {"engine": "simulate"},
            "profile=null: expected a result.json of a real run, or a YAML of costs, with engine=simulate",
        ),
        ("transformer", {"engine": "simulate", "profile": "no"}, "profile=no: expected a file that exists"),
        ("mlp", {"resume": "no/such"}, "resume=no/such: expected auto, never, or the folder of a sweep"),
        ("mlp", {"retry": "fail"}, "retry=fail: expected one of failed, oom, all (did you mean 'failed'?)"),
        (
            "mlp",
            {"retry": "all", "resume": "never"},
            "retry=all: expected null with resume=never, which measures every point",
        ),
        ("transformer", {"stages": 19}, "stages=19: expected at most 18, the layers of model=transformer"),
        ("mlp", {"stages": 19}, "stages=19: expected at most 18, the layers of model=mlp"),
        ("synthetic", {"stages": 9}, "stages=9: expected at most 8, the layers of model=synthetic"),
        ("transformer", {"micro": 33}, "micro=33: expected at most 32, the samples of a mini-batch (batch)"),
        ("transformer", {"partition": [9, 8]}, f"partition=[9, 8]: expected {COUNTS_OF_18}"),
        ("transformer", {"partition": [6, 6, 6]}, f"partition=[6, 6, 6]: expected {COUNTS_OF_18}"),
        ("transformer", {"partition": [0, 18]}, f"partition=[0, 18]: expected {LIST_OF_COUNTS}"),
        ("transformer", {"partition": [8.5, 9.5]}, f"partition=[8.5, 9.5]: expected {LIST_OF_COUNTS}"),
        ("transformer", {"partition": 5}, f"partition=5: expected {LIST_OF_COUNTS}"),
        (
            "transformer",
            {"partition": "timed"},
            "partition=timed: expected one of time, parameters, uniform, a list of layer counts such as [5,5]"
            " (did you mean 'time'?)",
        ),
        (
            "transformer",
            {"data__path": "no/such"},
            "data.path=no/such: expected a file or folder that exists, or null for Python's standard library",
        ),
    ],
)  # fmt: skip
def test_a_value_out_of_place_is_answered_with_key_value_and_what_is_allowed(
    model: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(changed(point(f"model={model}"), **values), TWO_CORES)
    assert str(caught.value) == message


def test_a_model_cannot_be_told_to_be_of_another_kind() -> None:
    with pytest.raises(ConfigError, match=r"^model\.kind"):
        points_of("model=mlp model.kind=synthetic")


def test_several_experiments_at_once_are_refused() -> None:
    """Each brings its own `sweeper.params`, which must not be dropped without a word."""
    with pytest.raises(ConfigError, match="several experiments"):
        points_of("-m experiment=quick,mlp")


def test_no_experiment_can_be_written_out() -> None:
    assert points_of("experiment=null") == points_of("")


def test_defaults_resolve_on_two_cores() -> None:
    default = point()
    assert (default.stages, default.micro, default.schedule, default.recompute) == (2, 8, "gpipe", "never")
    assert (default.device, default.threads) == ("cpu", 1)


@pytest.mark.parametrize(
    ("values", "machine", "device", "threads"),
    [
        ({"stages": 1}, TWO_CORES, "cpu", 2),
        ({"stages": 4}, TWO_CORES, "cpu", 1),
        ({"stages": 3}, Machine(8, 0), "cpu", 2),
        ({"threads": 5}, TWO_CORES, "cpu", 5),
        ({"stages": 2}, TWO_GPUS, "cuda", 4),
        ({"device": "cpu"}, TWO_GPUS, "cpu", 4),
        ({"device": "cuda"}, TWO_GPUS, "cuda", 4),
    ],
)
def test_auto_stands_for_what_the_machine_has(
    values: dict[str, Any], machine: Machine, device: str, threads: int
) -> None:
    asked = changed(point(), **{"device": "auto", "threads": "auto", **values})
    resolved = resolve(asked, machine)
    assert (resolved.device, resolved.threads) == (device, threads)


def test_the_first_swept_key_varies_slowest() -> None:
    grid = compose_grid(shlex.split("-m stages=1,2 micro=4,8 schedule=1f1b"))
    assert grid is not None
    assert [(p.stages, p.micro, p.schedule) for p in grid.points] == [
        (1, 4, "1f1b"),
        (1, 8, "1f1b"),
        (2, 4, "1f1b"),
        (2, 8, "1f1b"),
    ]
    assert grid.swept == ("stages", "micro")
    assert grid.experiment == ""


def test_the_command_line_wins_over_an_experiments_values() -> None:
    assert [p.micro for p in points_of("-m experiment=quick micro=4,16")] == [4, 16]
    assert {p.steps for p in points_of("-m experiment=quick steps=3")} == {3}


UNION = """
hydra:
  sweeper:
    params:
      stages: 2
      micro: 4,8
      one_of:
        - {engine: "pipebench,torch", schedule: 1f1b}
        - {schedule: zb_v, partition: "[5,4,4,5]"}
        - {schedule: gpipe, stages: 1}
"""


def union(folder: Path, command_line: str = "", text: str = UNION) -> Grid | None:
    """Compose an experiment of the user's own."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\n" + text)
    return compose_grid(["-m", "--config-dir", str(folder), "experiment=mine", *shlex.split(command_line)])


def test_points_of_one_of_several_grids_follow_one_another_for_each_combination_of_the_rest(tmp_path: Path) -> None:
    grid = union(tmp_path)
    assert grid is not None
    assert [(p.micro, p.engine, p.schedule, p.stages) for p in grid.points] == [
        (micro, engine, schedule, stages)
        for micro in (4, 8)
        for engine, schedule, stages in (
            ("pipebench", "1f1b", 2),
            ("torch", "1f1b", 2),
            ("pipebench", "zb_v", 2),
            ("pipebench", "gpipe", 1),
        )
    ]
    assert [p.partition for p in grid.points[:3]] == ["time", "time", [5, 4, 4, 5]]
    assert set(grid.swept) == {"stages", "micro", "engine", "schedule", "partition"}


def test_the_command_line_wins_over_every_grid_of_an_experiment(tmp_path: Path) -> None:
    grid = union(tmp_path, "engine=pipebench micro=2 partition=uniform stages=2")
    assert grid is not None
    assert [(p.engine, p.micro, p.partition, p.stages) for p in grid.points] == [("pipebench", 2, "uniform", 2)] * 3
    assert [p.schedule for p in grid.points] == ["1f1b", "zb_v", "gpipe"]


def test_grids_that_are_no_list_of_keys_with_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one_of=4,8: expected a list of grids, each KEY: VALUES"):
        union(tmp_path, text="hydra: {sweeper: {params: {one_of: '4,8'}}}")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes_and_every_point_of_it_is_sound(experiment: str) -> None:
    grid = compose_grid(["-m", f"experiment={experiment}"])
    assert grid is not None
    assert grid.experiment == experiment
    points = [resolve(each, TWO_CORES) for each in defined_points(grid)]
    assert len({key_of(each) for each in points}) == len(points) > 1
    assert grid.swept


def test_a_number_of_stages_that_a_schedule_has_not_is_left_out_of_a_sweep_over_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = compose_grid(["-m", "schedule=gpipe,interleaved,zb_v,zb_auto", "chunks=auto,2,3"])
    assert grid is not None
    assert [(p.schedule, p.chunks) for p in defined_points(grid)] == [
        ("gpipe", "auto"),
        ("interleaved", "auto"),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zb_v", "auto"),
        ("zb_v", 2),
        ("zb_auto", "auto"),
    ]
    assert capsys.readouterr().out.startswith(
        "left out, since not defined: gpipe with chunks=2, gpipe with chunks=3, zb"
    )
    alone = compose_grid(["-m", "chunks=2,3"])
    assert alone is not None
    assert defined_points(alone) == alone.points, "asked for alone it is a mistake, and answered as one"


@pytest.mark.parametrize("model", sorted({*MODELS.split(", ")} - {"custom", "hf"}))
def test_every_model_composes_with_data_that_suit_it(model: str) -> None:
    assert point(f"model={model}").model.name == model


@pytest.mark.parametrize(("counts", "stages"), [([9, 9], 2), ([1, 16, 1], 3), ([18], 1)])
def test_layer_counts_that_fit_are_taken(counts: list[int], stages: int) -> None:
    assert resolve(changed(point(), partition=counts, stages=stages), TWO_CORES).partition == counts


def test_layer_counts_are_written_as_a_list() -> None:
    assert point("partition=[9,9]").partition == [9, 9]


def test_a_point_keeps_its_key() -> None:
    assert re.fullmatch(r"[0-9a-f]{12}", key_of(point()))
    assert key_of(point("stages=2 micro=8 threads=1")) == key_of(point())


@pytest.mark.parametrize(
    "difference",
    [
        {"stages": 3}, {"micro": 4}, {"schedule": "1f1b"}, {"recompute": "always"}, {"partition": "uniform"},
        {"partition": [9, 9]}, {"batch": 16}, {"seed": 1}, {"model__width": 64}, {"optimizer__name": "sgd"},
        {"chunks": 2}, {"memory_limit": "2p"}, {"model__tied": True}, {"optimizer__weight_decay": 0.5},
        {"optimizer__clip_norm": 1.0}, {"optimizer__accumulate": 2}, {"optimizer__loss_scale": "dynamic"},
        {"optimizer__lr": 0.5}, {"precision": "bf16"}, {"threads": 2}, {"device": "cuda"}, {"steps": 3},
        {"warmup": 3}, {"gate": "off"}, {"engine": "torch"}, {"data__max_bytes": 9999},
    ],
    ids=lambda difference: str(*difference),
)  # fmt: skip
def test_what_is_measured_is_in_the_key(difference: dict[str, Any]) -> None:
    assert key_of(changed(point(), **difference)) != key_of(point())


@pytest.mark.parametrize("sweep", ["bubble_vs_bound", "quick", "schedules"])
def test_settings_that_came_later_leave_the_keys_of_old_points_alone(sweep: str) -> None:
    for path in (Path(__file__).resolve().parents[2] / "results" / sweep / "runs").glob("*/result.json"):
        assert key_of(read_result(path).config) == path.parent.name


def test_the_rows_of_a_schedule_file_and_the_costs_of_a_profile_are_in_the_key(tmp_path: Path) -> None:
    first, second, profile = (tmp_path / name for name in ("first.csv", "second.csv", "costs.yaml"))
    first.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    second.write_text(first.read_text())
    base = changed(point(), micro=2)
    keys = [key_of(changed(base, schedule=str(path))) for path in (first, second)]
    assert keys[0] == keys[1], "what the file is called does not matter"
    second.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    assert key_of(changed(base, schedule=str(second))) != keys[0]
    keys = []
    for text in ("forward_s: 1", "forward_s: 2"):
        profile.write_text(text)
        keys.append(key_of(changed(base, profile=str(profile))))
    assert keys[0] != keys[1]


def test_a_schedule_file_decides_how_many_stages_a_rank_has(tmp_path: Path) -> None:
    path = tmp_path / "folded.csv"
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    folded = changed(point(), schedule=str(path), micro=1, chunks="auto", partition=[4, 4, 5, 5])
    assert resolve(folded, TWO_CORES).partition == [4, 4, 5, 5]
    for values, message in [
        ({"chunks": 2}, f"chunks=2: expected auto with schedule={path}, whose rows say which stages a rank has"),
        (
            {"partition": [9, 9]},
            "partition=[9, 9]: expected 4 counts (stages x chunks) that add up to 18, the layers of model=transformer",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            resolve(changed(folded, **values), TWO_CORES)
        assert str(caught.value) == message
    with pytest.raises(ScheduleError, match="has 2 ranks and 1 micro-batches: expected stages=2 and micro=8"):
        resolve(changed(folded, micro=8), TWO_CORES)


@pytest.mark.parametrize(
    "same",
    [
        {"repeats": 3},
        {"noise_floor": False},
        {"on_failure": "stop", "point_limit_s": 60, "progress_limit_s": 5.5},
        {"results_dir": "elsewhere"},
        {"resume": "never"},
        {"retry": "all"},
        {"trackers": []},
        {"wandb__mode": "disabled"},
    ],
)
def test_where_results_go_and_how_often_it_is_measured_are_not_in_the_key(same: dict[str, Any]) -> None:
    assert key_of(changed(point(), **same)) == key_of(point())


def test_the_key_may_leave_out_what_the_machine_resolved() -> None:
    elsewhere = changed(point(), threads=7, device="cuda")
    assert key_of(elsewhere, RESOLVED_BY_THE_MACHINE) == key_of(point(), RESOLVED_BY_THE_MACHINE) != key_of(point())
    assert key_of(elsewhere, ["device"]) != key_of(point(), ["device"])


@pytest.mark.parametrize(
    ("values", "machine", "ranks"),
    [
        ({"stages": 2, "threads": 1}, TWO_CORES, 1.0),
        ({"stages": 4, "threads": 1}, TWO_CORES, 2.0),
        ({"stages": 2, "threads": 3}, TWO_CORES, 3.0),
        ({"stages": 1, "threads": 1}, TWO_CORES, 1.0),
        ({"stages": 4, "threads": 4, "device": "cuda"}, TWO_GPUS, 2.0),
        ({"stages": 2, "threads": 4, "device": "cuda"}, TWO_GPUS, 1.0),
        ({"stages": 8, "threads": 1, "engine": "simulate"}, TWO_CORES, 1.0),
    ],
)
def test_ranks_share_a_device_where_there_are_too_few(values: dict[str, Any], machine: Machine, ranks: float) -> None:
    assert ranks_per_device(changed(point(), **values), machine) == ranks


def test_sleeping_stages_need_no_device() -> None:
    assert ranks_per_device(changed(point("model=synthetic"), stages=8), TWO_CORES) == 1.0


def test_a_value_is_found_at_its_dotted_key_and_a_group_by_its_name() -> None:
    default = point("model=mlp")
    assert value_at(default, "optimizer.lr") == 0.001
    assert value_at(default, "model") == "mlp"
    assert value_at(default, "model.width") == 256


@pytest.fixture(scope="module")
def help_text() -> str:
    command = [sys.executable, "-m", "pipebench", "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_help_names_the_experiment(help_text: str, experiment: str) -> None:
    [line] = [line for line in help_text.splitlines() if line.strip().startswith("experiment=NAME")]
    assert experiment in re.split(r"[ ,]+", line.strip())


@pytest.mark.parametrize("key", TOP_LEVEL_KEYS)
def test_help_mentions_the_key(help_text: str, key: str) -> None:
    assert re.search(rf"(?<![\w.]){key}[=.]", help_text)


def test_shared_memory_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(ConfigError, match="transport=shared: expected auto or network"):
        resolve(point("transport=shared"), TWO_CORES)


def test_arguments_of_ones_own_function_have_any_name_and_may_be_swept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [custom]\nname: mine\narguments: {width: 1, depth: 2}\n")
    grid = compose_grid(["-m", "--config-dir", str(tmp_path), "model=mine", "model.arguments.width=3,[4]",
                         "data.arguments={size: 5}"])  # fmt: skip
    assert grid is not None
    assert grid.swept == ("model.arguments.width",)
    assert grid.folder == str(tmp_path)
    assert [point.model.arguments for point in grid.points] == [{"width": 3, "depth": 2}, {"width": [4], "depth": 2}]
    assert [point.data.arguments for point in grid.points] == [{"size": 5}] * 2
    assert value_at(grid.points[0], "model.arguments.width") == 3


def test_an_edited_file_is_another_point() -> None:
    grid = compose_grid(["model=custom", "model.target=mine:net", "data.target=mine:batch"])
    assert grid is not None
    [point] = grid.points
    edited = [
        dataclasses.replace(point, **{group: dataclasses.replace(getattr(point, group), source="1")})
        for group in ("model", "data")
    ]
    assert len({key_of(config) for config in (point, *edited)}) == 3
    assert config_from(dataclasses.asdict(edited[0])) == edited[0]
