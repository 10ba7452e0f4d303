"""What a point is: the typed schema that Hydra merges into, and the checks that run before any process starts.

Values live in conf/, types and rules here. Nothing in this file imports torch: the command line must answer
`--help` and refuse a bad grid at once.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from pipebench.errors import ConfigError
from pipebench.machine import Machine
from pipebench.schedule.builders import SCHEDULES, Recompute, with_recompute
from pipebench.schedule.catalogue import ZB_AUTO, build, is_file
from pipebench.schedule.validate import validate

ENGINES = ("pipebench", "torch", "deepspeed", "torchgpipe", "ddp", "fsdp", "single", "simulate")
PARTITIONS = ("time", "parameters", "uniform")
OPTIMIZERS = ("sgd", "adam", "adamw")
PRECISIONS = ("fp32", "bf16", "fp16")
DECAYS = ("all", "matrices")
LR_SCHEDULES = ("constant", "linear", "cosine")
DEVICES = ("auto", "cpu", "cuda")
GATES = ("on", "off")
BATCH_NORMS = ("deferred", "micro_batch")
ON_FAILURE = ("continue", "stop")
WANDB_MODES = ("offline", "online", "disabled")
TRACKERS = ("wandb", "tensorboard")
RESUMES = ("auto", "never")
RETRIES = ("failed", "oom", "all")
TRANSPORTS = ("auto", "shared", "network")
TASKS = ("regression", "classification")
ATTENTIONS = ("fused", "explicit")
NORMS = ("layer", "batch")
LOSSES = ("mean_squared_error", "cross_entropy", "next_token")
FAMILIES = ("gpt2", "llama")

FOUND = {"found": True}
"""Marks what users do not write: the bench finds it out before it starts (`harness.vet`)."""


@dataclass
class TransformerConfig:
    kind: str = "transformer"
    name: str = MISSING
    layers: int = MISSING
    width: int = MISSING
    heads: int = MISSING
    feed_forward: int = MISSING
    vocabulary: int = MISSING
    sequence: int = MISSING
    dropout: float = MISSING
    tied: bool = False
    attention: str = "fused"

    @property
    def num_layers(self) -> int:
        """Embedding, two halves a block, head."""
        return 2 * self.layers + 2


@dataclass
class MlpConfig:
    kind: str = "mlp"
    name: str = MISSING
    layers: int = MISSING
    width: int = MISSING
    inputs: int = MISSING
    outputs: int = MISSING
    task: str = MISSING
    dropout: float = MISSING
    norm: str = "layer"

    @property
    def num_layers(self) -> int:
        """Input projection, residual layers, output projection."""
        return self.layers + 2


@dataclass
class UMlpConfig:
    kind: str = "u_mlp"
    name: str = MISSING
    depth: int = MISSING
    width: int = MISSING
    inputs: int = MISSING
    outputs: int = MISSING
    dropout: float = MISSING

    @property
    def num_layers(self) -> int:
        """Input projection, `depth` layers down and as many up, one between them, output projection."""
        return 2 * self.depth + 3


@dataclass
class SyntheticConfig:
    kind: str = "synthetic"
    name: str = MISSING
    layers: int = MISSING
    width: int = MISSING
    forward_s: float = MISSING
    backward_s: float = MISSING
    weight_share: float = MISSING
    imbalance: float = MISSING

    @property
    def num_layers(self) -> int:
        return self.layers


@dataclass
class CustomConfig:
    """A user's own layers. `source` is a hash of the file of `target`: edited, it is another point."""

    kind: str = "custom"
    name: str = MISSING
    target: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    loss: str = MISSING
    num_layers: int = field(default=0, metadata=FOUND)
    source: str = field(default="", metadata=FOUND)


@dataclass
class HfConfig:
    """A causal language model of Hugging Face's transformers; what is None becomes the family's own default."""

    kind: str = "hf"
    name: str = MISSING
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None
    feed_forward: int | None = None
    vocabulary: int | None = None
    sequence: int | None = None
    dropout: float | None = None
    num_layers: int = field(default=0, metadata=FOUND)


ModelConfig = TransformerConfig | MlpConfig | UMlpConfig | SyntheticConfig | CustomConfig | HfConfig
MODELS = {
    "transformer": TransformerConfig,
    "mlp": MlpConfig,
    "u_mlp": UMlpConfig,
    "synthetic": SyntheticConfig,
    "custom": CustomConfig,
    "hf": HfConfig,
}


@dataclass
class TextConfig:
    kind: str = "text"
    name: str = MISSING
    path: str | None = None
    max_bytes: int = MISSING
    sequence: int | None = None


@dataclass
class TeacherConfig:
    kind: str = "teacher"
    name: str = MISSING


@dataclass
class CustomDataConfig:
    """A user's own mini-batches; `source` as in CustomConfig."""

    kind: str = "custom"
    name: str = MISSING
    target: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    source: str = field(default="", metadata=FOUND)


DataConfig = TextConfig | TeacherConfig | CustomDataConfig
DATA = {"text": TextConfig, "teacher": TeacherConfig, "custom": CustomDataConfig}
DATA_OF_MODEL = {
    "transformer": ("text", "custom"),
    "mlp": ("teacher", "custom"),
    "u_mlp": ("teacher", "custom"),
    "synthetic": ("teacher",),
    "custom": ("custom", "text"),
    "hf": ("text", "custom"),
}

FREE_KEYS = ("model.arguments", "data.arguments")
"""Keys under which the names are the user's own."""


@dataclass
class OptimizerConfig:
    """How mini-batches become updates; conf/optimizer says what each key means. Defaults change nothing of a step."""

    name: str = MISSING
    lr: float = MISSING
    weight_decay: float | None = None
    decay: str = "all"
    momentum: float = 0.0
    lr_schedule: str = "constant"
    lr_warmup: int = 0
    lr_decay: int | None = None
    lr_floor: float = 0.0
    clip_norm: float | None = None
    loss_scale: Any = None
    accumulate: int = 1


@dataclass
class WandbConfig:
    mode: str = MISSING
    project: str = MISSING
    entity: str | None = None


@dataclass
class RunConfig:
    """One point of a sweep. conf/config.yaml says what each key means."""

    stages: int = MISSING
    micro: int = MISSING
    replicas: int = MISSING
    schedule: str = MISSING
    chunks: Any = MISSING
    memory_limit: Any = MISSING
    recompute: str = MISSING
    recompute_budget: Any = MISSING
    partition: Any = MISSING
    batch_norm: str = MISSING
    engine: str = MISSING
    profile: str | None = MISSING
    batch: int = MISSING
    model: Any = MISSING
    data: Any = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: str = MISSING
    device: str = MISSING
    threads: Any = MISSING
    transport: str = MISSING
    warmup: int = MISSING
    steps: int = MISSING
    evaluate_every: int = MISSING
    evaluate_batch: int | None = MISSING
    save: bool = MISSING
    load: str | None = MISSING
    repeats: int = MISSING
    noise_floor: bool = MISSING
    on_failure: str = MISSING
    point_limit_s: Any = MISSING
    progress_limit_s: Any = MISSING
    seed: int = MISSING
    gate: str = MISSING
    resume: str = MISSING
    retry: str | None = MISSING
    results_dir: str = MISSING
    dry_run: bool = MISSING
    force: bool = MISSING
    trackers: list[str] = MISSING
    wandb: WandbConfig = field(default_factory=WandbConfig)


MOST_STEPS = 1_000_000
"""More would run for weeks: a typing error."""

LONGEST_LIMIT_S = 86_400
"""A day."""

NOT_PART_OF_THE_POINT = (
    *("results_dir", "trackers", "wandb", "repeats", "noise_floor", "resume", "retry"),
    *("on_failure", "point_limit_s", "progress_limit_s", "dry_run", "force"),
)
"""Keys that say where results go, what to measure again or what to do about a failure, not what is measured."""

USUALLY = {
    "transport": "auto",
    "batch_norm": "deferred",
    "recompute_budget": None,
    "model.attention": "fused",
    "model.norm": "layer",
    "evaluate_every": 0,
    "evaluate_batch": None,
    "save": False,
    "load": None,
    "model.tied": False,
    "data.sequence": None,
    **{f"optimizer.{entry.name}": entry.default for entry in dataclasses.fields(OptimizerConfig)},
}
"""Keys that came later, with what they were before."""

SAVED_FILE = "saved.json"
"""What a folder must hold to be loaded; see `saved`."""

RESOLVED_BY_THE_MACHINE = ("device", "threads")
"""Keys whose `auto` becomes what the machine has, so that the same command line has other keys elsewhere."""


def closest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'gpipe'?)`, or nothing when no known word is close."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check(config: RunConfig) -> None:
    """Check what each key allows by itself, before anything is known of a user's own model; raise as `resolve` does."""
    _check_names(config)
    _check_numbers(config)
    _check_model(config.model)
    _check_data(config)


def resolve(config: RunConfig, machine: Machine) -> RunConfig:
    """Check one point and replace every `auto` by what it stands for on this machine.

    Raise ConfigError, one line with key, value and what is allowed.
    """
    check(config)
    config = dataclasses.replace(config, chunks=_resolve_chunks(config))
    _check_memory_limit(config)
    _check_budget(config)
    _check_fit(config)
    _check_schedule(config)
    device = _resolve_device(config.device, machine)
    threads = _resolve_threads(config, machine)
    _check_load(config)
    if config.engine == "simulate":
        _check_profile(config)
        config = dataclasses.replace(config, evaluate_every=0, evaluate_batch=None, save=False, load=None)
    else:  # real runs measure, so that both may stand in one sweep
        config = dataclasses.replace(config, profile=None)
    return dataclasses.replace(config, device=device, threads=threads)


def key_of(config: RunConfig, apart_from: Collection[str] = ()) -> str:
    """Return the name of a resolved point: a hash of everything that says what is measured.

    `apart_from` names what may differ besides, where points of other machines are looked for.
    """
    point = dataclasses.asdict(config)
    for name in (*NOT_PART_OF_THE_POINT, *apart_from):
        del point[name]
    for path, usual in USUALLY.items():  # so that points are called what they were before there was a choice
        *groups, name = path.split(".")
        group = point[groups[0]] if groups else point
        if name in group and group[name] == usual:
            del group[name]
    if is_file(config.schedule):  # the rows count, not what they are called
        point["schedule"] = hashlib.sha256(Path(config.schedule).read_bytes()).hexdigest()
    if config.profile is not None:
        point["profile"] = hashlib.sha256(Path(config.profile).read_bytes()).hexdigest()
    if config.load is not None:
        point["load"] = hashlib.sha256((Path(config.load) / SAVED_FILE).read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:12]


def ranks_per_device(config: RunConfig, machine: Machine) -> float:
    """Return how many ranks share what would be a device each, a GPU or `threads` cores; 1 where none has to.

    Sleeping stages and simulated ones need no device.
    """
    if config.model.kind == "synthetic" or config.engine == "simulate":
        return 1.0
    if config.device == "cuda":
        return max(1.0, config.stages / max(1, machine.num_gpus))
    return max(1.0, config.stages * int(config.threads) / machine.num_cores)


def num_stages_of(config: RunConfig) -> list[int]:
    """Return the numbers of stages the model may be cut into: stages x chunks; several where a search chooses."""
    if is_file(config.schedule):
        return [build(config.schedule, config.stages, config.micro).num_stages]
    if config.chunks == "auto":
        most = config.model.num_layers
        if isinstance(config.partition, list):
            return [len(config.partition)]
        return [config.stages * chunks for chunks in range(1, most // config.stages + 1)] or [config.stages]
    return [config.stages * config.chunks]


def value_at(config: RunConfig, path: str) -> Any:
    """Return the value at a dotted key such as `optimizer.lr`; a group stands for its name."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value.name if dataclasses.is_dataclass(value) and hasattr(value, "name") else value


def tokens_of(config: RunConfig) -> int | None:
    """Return the tokens of a sample, None where samples are no text."""
    own = config.data.sequence if isinstance(config.data, TextConfig) else None
    return own or getattr(config.model, "sequence", None)


def known_keys(schema: type = RunConfig, prefix: str = "") -> list[str]:
    """Return every key a user may write, dotted."""
    keys = []
    for entry in dataclasses.fields(schema):
        if entry.metadata == FOUND:
            continue
        path = prefix + entry.name
        keys.append(path)
        nested = {"model": list(MODELS.values()), "data": list(DATA.values())}.get(path, [])
        if isinstance(entry.type, type) and dataclasses.is_dataclass(entry.type):
            nested = [entry.type]
        for node in nested:
            keys.extend(known_keys(node, path + "."))
    return list(dict.fromkeys(keys))


def is_free(key: str) -> bool:
    """Tell whether a key is of a user's function's arguments, which have names of Python, or is all of them."""
    of = next((free for free in FREE_KEYS if key.startswith(f"{free}.")), None)
    return key in FREE_KEYS or (of is not None and key.removeprefix(f"{of}.").replace(".", "_").isidentifier())


def is_known(key: str) -> bool:
    """Tell whether a point has such a key."""
    return key in known_keys() or is_free(key)


def _fail(key: str, value: object, expected: str) -> None:
    raise ConfigError(f"{key}={value}: expected {expected}")


def _check_name(key: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        _fail(key, value, f"one of {', '.join(allowed)}{closest(str(value), allowed)}")


def _check_names(config: RunConfig) -> None:
    if not is_file(config.schedule):
        _check_name("schedule", config.schedule, [*SCHEDULES, ZB_AUTO, "a .csv file"])
    _check_name("recompute", config.recompute, [choice.value for choice in Recompute])
    _check_name("engine", config.engine, ENGINES)
    _check_name("optimizer.name", config.optimizer.name, OPTIMIZERS)
    _check_name("optimizer.decay", config.optimizer.decay, DECAYS)
    _check_name("optimizer.lr_schedule", config.optimizer.lr_schedule, LR_SCHEDULES)
    _check_name("precision", config.precision, PRECISIONS)
    _check_name("device", config.device, DEVICES)
    _check_name("gate", config.gate, GATES)
    _check_name("batch_norm", config.batch_norm, BATCH_NORMS)
    _check_name("transport", config.transport, TRANSPORTS)
    if config.transport == "shared" and not hasattr(os, "memfd_create"):
        _fail("transport", "shared", "auto or network: only Linux has the memory it needs")
    _check_name("on_failure", config.on_failure, ON_FAILURE)
    _check_name("wandb.mode", config.wandb.mode, WANDB_MODES)
    _check_trackers(config.trackers)
    _check_resume(config)
    for group, kinds in (("model", MODELS), ("data", DATA)):
        chosen = getattr(config, group)
        if kinds.get(chosen.kind) is not type(chosen):
            right = next(kind for kind, schema in kinds.items() if schema is type(chosen))
            _fail(f"{group}.kind", chosen.kind, f"{right} ({group}=NAME chooses another)")
    fitting = DATA_OF_MODEL[config.model.kind]
    if config.data.kind not in fitting:
        _fail("data", config.data.name, f"{' or '.join(fitting)} for model={config.model.name}")


def _check_trackers(trackers: list[str]) -> None:
    for name in trackers:
        _check_name("trackers", name, TRACKERS)
    if len(set(trackers)) < len(trackers):
        _fail("trackers", f"[{','.join(trackers)}]", "each name once")


def _check_resume(config: RunConfig) -> None:
    if config.resume not in RESUMES and not Path(config.resume).is_dir():
        _fail("resume", config.resume, f"{', '.join(RESUMES)}, or the folder of a sweep")
    if config.retry is None:
        return
    _check_name("retry", config.retry, RETRIES)
    if config.resume == "never":
        _fail("retry", config.retry, "null with resume=never, which measures every point")


def _check_numbers(config: RunConfig) -> None:
    for key in ("stages", "micro", "replicas", "batch", "steps", "repeats"):
        if getattr(config, key) < 1:
            _fail(key, getattr(config, key), "a whole number of at least 1")
    for key in ("warmup", "evaluate_every"):
        if getattr(config, key) < 0:
            _fail(key, getattr(config, key), "a whole number of at least 0")
    if config.evaluate_batch is not None and config.evaluate_batch < 1:
        _fail("evaluate_batch", config.evaluate_batch, "a whole number of at least 1, or null for as many as batch")
    if config.micro > config.batch:
        _fail("micro", config.micro, f"at most {config.batch}, the samples of a mini-batch (batch)")
    if config.replicas != 1:
        _fail("replicas", config.replicas, "1 (data parallelism beside the pipeline is not built yet)")
    _check_optimizer(config.optimizer)
    if config.precision == "fp16" and config.optimizer.loss_scale is None and config.engine != "simulate":
        _fail("precision", "fp16", "optimizer.loss_scale=dynamic or a number beside it, else gradients vanish")
    if not 0 <= config.seed < 2**31:
        _fail("seed", config.seed, "a whole number from 0 to 2147483647")
    for key in ("steps", "warmup", "repeats"):
        if getattr(config, key) > MOST_STEPS:
            _fail(key, getattr(config, key), f"at most {MOST_STEPS}")
    for key in ("point_limit_s", "progress_limit_s"):
        limit = getattr(config, key)
        if limit != "auto" and (type(limit) not in (int, float) or not 0 < limit <= LONGEST_LIMIT_S):
            _fail(key, limit, f"auto or seconds above 0 and up to {LONGEST_LIMIT_S}")


def _check_data(config: RunConfig) -> None:
    match config.data:
        case CustomDataConfig():
            _check_target("data.target", config.data.target)
        case TextConfig():
            vocabulary = getattr(config.model, "vocabulary", None)
            if vocabulary is not None and vocabulary < 256:
                _fail("model.vocabulary", vocabulary, "at least 256, since the data are bytes")
            _check_sequence(config)
            _check_text(config.data, (tokens_of(config) or 1) + 1)


def _check_sequence(config: RunConfig) -> None:
    """A family's own default may not be known yet; it is long enough for what it is used for."""
    sequence, longest = config.data.sequence, getattr(config.model, "sequence", None)
    if config.model.kind == "custom" and sequence is None:
        _fail("data.sequence", "null", f"the tokens of a sample, with model={config.model.name}")
    if sequence is not None and not 1 <= sequence <= (longest or sequence):
        most = f"at most model.sequence={longest}" if longest else "at least 1"
        _fail("data.sequence", sequence, f"a whole number of {most}")


def _check_load(config: RunConfig) -> None:
    if config.load is not None and not (Path(config.load) / SAVED_FILE).is_file():
        _fail("load", config.load, f"null, or a folder that save=true made, with a {SAVED_FILE}")


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if not 0 < optimizer.lr < math.inf:
        _fail("optimizer.lr", optimizer.lr, "a number above 0")
    if optimizer.weight_decay is not None and not 0 <= optimizer.weight_decay < math.inf:
        _fail("optimizer.weight_decay", optimizer.weight_decay, "null or a number of at least 0")
    if not 0 <= optimizer.momentum < 1:
        _fail("optimizer.momentum", optimizer.momentum, "a number from 0 to below 1")
    if optimizer.momentum and optimizer.name != "sgd":
        _fail("optimizer.momentum", optimizer.momentum, f"0 with optimizer.name={optimizer.name}")
    if optimizer.clip_norm is not None and not 0 < optimizer.clip_norm < math.inf:
        _fail("optimizer.clip_norm", optimizer.clip_norm, "null or a number above 0")
    scale = optimizer.loss_scale
    if scale not in (None, "dynamic") and (type(scale) not in (int, float) or not 0 < scale < math.inf):
        _fail("optimizer.loss_scale", scale, "null, dynamic or a number above 0")
    if optimizer.accumulate < 1:
        _fail("optimizer.accumulate", optimizer.accumulate, "a whole number of at least 1")
    _check_learning_rate(optimizer)


def _check_learning_rate(optimizer: OptimizerConfig) -> None:
    if optimizer.lr_warmup < 0:
        _fail("optimizer.lr_warmup", optimizer.lr_warmup, "a whole number of at least 0")
    if not 0 <= optimizer.lr_floor <= 1:
        _fail("optimizer.lr_floor", optimizer.lr_floor, "a number from 0 to 1")
    constant = optimizer.lr_schedule == "constant"
    if constant and (optimizer.lr_decay is not None or optimizer.lr_floor):
        key = "lr_floor" if optimizer.lr_decay is None else "lr_decay"
        _fail(f"optimizer.{key}", getattr(optimizer, key), "optimizer.lr_schedule=linear or cosine beside it")
    if not constant and (optimizer.lr_decay is None or optimizer.lr_decay <= optimizer.lr_warmup):
        told = "null" if optimizer.lr_decay is None else optimizer.lr_decay
        _fail("optimizer.lr_decay", told, f"a whole number above optimizer.lr_warmup={optimizer.lr_warmup}")


def _check_text(data: TextConfig, at_least: int) -> None:
    """`at_least` bytes are one sample and its successor."""
    if data.max_bytes < at_least:
        _fail("data.max_bytes", data.max_bytes, f"at least {at_least}, a sample's tokens and one more")
    if data.path is None:
        return
    path = Path(data.path)
    if not path.is_file() and not path.is_dir():
        _fail("data.path", data.path, "a file or folder that exists, or null for Python's standard library")
    size = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            if not os.access(file, os.R_OK):
                _fail("data.path", data.path, f"files that may be read, unlike {file}")
            size += file.stat().st_size
        if size >= at_least:
            return
    _fail("data.path", data.path, f"at least {at_least} bytes (a sample's tokens and one more), found {size}")


def _check_model(model: ModelConfig) -> None:
    for entry in dataclasses.fields(model):
        value = getattr(model, entry.name)
        if entry.type in (int, int | None) and entry.metadata != FOUND and value is not None and value < 1:
            _fail(f"model.{entry.name}", value, "a whole number of at least 1")
    match model:
        case TransformerConfig():
            if model.width % model.heads:
                _fail("model.heads", model.heads, f"a divisor of model.width={model.width}")
            _check_name("model.attention", model.attention, ATTENTIONS)
        case MlpConfig():
            _check_name("model.task", model.task, TASKS)
            _check_name("model.norm", model.norm, NORMS)
        case UMlpConfig():
            if model.width % 2**model.depth:
                _fail("model.width", model.width, f"a multiple of {2**model.depth}: it is halved model.depth times")
        case CustomConfig():
            _check_target("model.target", model.target)
            if not _is_target(model.loss):
                _check_name("model.loss", model.loss, [*LOSSES, TARGET_FORM])
        case HfConfig():
            _check_name("model.name", model.name, FAMILIES)
        case SyntheticConfig():
            for key, seconds in (("forward_s", model.forward_s), ("backward_s", model.backward_s)):
                if not 0 <= seconds < 60:
                    _fail(f"model.{key}", seconds, "seconds from 0 to 60")
            if not 0 <= model.weight_share <= 1:
                _fail("model.weight_share", model.weight_share, "a number from 0 to 1")
            if not model.imbalance >= 0:
                _fail("model.imbalance", model.imbalance, "a number of at least 0")
    dropout = getattr(model, "dropout", None)
    if dropout is not None and not 0 <= dropout < 1:
        _fail("model.dropout", dropout, "a number from 0 to below 1")


TARGET_FORM = "package.module:function"


def _is_target(text: str) -> bool:
    module, colon, function = text.partition(":")
    parts = module.split(".")
    return bool(colon) and function.isidentifier() and parts[-1] != "py" and all(map(str.isidentifier, parts))


def _check_target(key: str, target: str | None) -> None:
    if target is None:
        _fail(key, "null", TARGET_FORM)
    elif not _is_target(target):
        _fail(key, target, f"{TARGET_FORM}, such as mine:{key.partition('.')[0]} for a function in mine.py")


def _check_fit(config: RunConfig) -> None:
    num_layers, num_stages = config.model.num_layers, num_stages_of(config)
    if min(num_stages) > num_layers:
        what = f"layers of model={config.model.name}"
        if config.chunks in (1, "auto"):
            _fail("stages", config.stages, f"at most {num_layers}, the {what}")
        _fail("chunks", config.chunks, f"stages x chunks of at most {num_layers}, the {what}; it is {min(num_stages)}")
    if isinstance(config.partition, str):
        _check_name("partition", config.partition, [*PARTITIONS, "a list of layer counts such as [5,5]"])
        return
    counts = config.partition
    if not isinstance(counts, list) or not all(type(count) is int and count >= 1 for count in counts):
        _fail("partition", counts, f"one of {', '.join(PARTITIONS)}, or a list of layer counts of at least 1")
    searched = config.schedule == ZB_AUTO and config.chunks == "auto"
    fits = len(counts) % config.stages == 0 if searched else len(counts) in num_stages
    if not fits or sum(counts) != num_layers:
        wanted = f"a multiple of {config.stages}" if searched else num_stages[0]
        _fail(
            "partition",
            counts,
            f"{wanted} counts (stages x chunks) that add up to {num_layers}, the layers of model={config.model.name}",
        )


def _resolve_chunks(config: RunConfig) -> Any:
    """Return the stages per rank, or `auto` where something else decides: a file's rows, or the search."""
    chunks = config.chunks
    if chunks != "auto" and (type(chunks) is not int or chunks < 1):
        _fail("chunks", chunks, "auto or a whole number of at least 1")
    if is_file(config.schedule):
        if chunks != "auto":
            _fail("chunks", chunks, f"auto with schedule={config.schedule}, whose rows say which stages a rank has")
        return chunks
    if config.schedule == ZB_AUTO:
        return chunks
    return SCHEDULES[config.schedule].usual_chunks if chunks == "auto" else chunks


def _check_memory_limit(config: RunConfig) -> None:
    limit = config.memory_limit
    if limit == "auto":
        return
    if config.schedule != ZB_AUTO:
        _fail("memory_limit", limit, f"auto with schedule={config.schedule}: only {ZB_AUTO} keeps a limit")
    if limit_in_pipelines(limit) is None and (type(limit) not in (int, float) or not limit > 0):
        _fail("memory_limit", limit, "auto, MiB of activations a rank, or 2p for twice what 1F1B's first rank holds")


def _check_budget(config: RunConfig) -> None:
    budget = config.recompute_budget
    if config.recompute != Recompute.BUDGET.value:
        if budget is not None:
            _fail("recompute_budget", budget, f"null with recompute={config.recompute}: only budget keeps one")
        return
    if type(budget) not in (int, float) or not budget > 0:
        _fail("recompute_budget", budget, "MiB of activations a rank, above 0, with recompute=budget")
    if config.schedule == ZB_AUTO:
        _fail("recompute", "budget", f"another setting with schedule={ZB_AUTO}, which keeps memory_limit")


def limit_in_pipelines(limit: Any) -> float | None:
    """Return 1.5 for `1.5p`, in units of K micro-batches of a whole rank; None for what is not written so."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)p", str(limit))
    return float(match[1]) if match and float(match[1]) > 0 else None


def _check_schedule(config: RunConfig) -> None:
    """Build and validate now what would otherwise fail in front of the processes."""
    if config.schedule == ZB_AUTO:
        return
    chunks = None if config.chunks == "auto" else config.chunks
    schedule = build(config.schedule, config.stages, config.micro, chunks)
    validate(with_recompute(schedule, Recompute(config.recompute)))


def _check_profile(config: RunConfig) -> None:
    if config.profile is None and config.model.kind != "synthetic":
        _fail("profile", "null", "a result.json of a real run, or a YAML of costs, with engine=simulate")
    if config.profile is not None and not Path(config.profile).is_file():
        _fail("profile", config.profile, "a file that exists")


def _resolve_device(device: str, machine: Machine) -> str:
    if device == "cuda" and machine.num_gpus == 0:
        _fail("device", device, "auto or cpu, since this machine shows no CUDA GPU to PyTorch")
    if device == "auto":
        return "cuda" if machine.num_gpus else "cpu"
    return device


def _resolve_threads(config: RunConfig, machine: Machine) -> int:
    if config.threads == "auto":
        return max(1, machine.num_cores // config.stages)
    if type(config.threads) is not int or config.threads < 1:
        _fail("threads", config.threads, "auto or a whole number of at least 1")
    return int(config.threads)
