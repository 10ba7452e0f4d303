"""What stages cost, worked out from what their layers cost: search, simulation and memory model start from it.

Times and activations are taken to grow in proportion to the samples of a micro-batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from pipebench.activations import spans, stage_activations
from pipebench.config import OptimizerConfig, RunConfig, SyntheticConfig
from pipebench.errors import ConfigError, ResultError
from pipebench.metrics import action_costs
from pipebench.record import Footprint, LayerProfile, LayerRun, RunResult, StageMemory, read_result, traces
from pipebench.schedule.action import Op, Schedule
from pipebench.schedule.memory import Peak, peak_activation_bytes
from pipebench.schedule.simulate import Link


@dataclass(frozen=True, slots=True)
class Profile:
    """What a simulation needs to know: layers with seconds, the optimizer's seconds for each, and the links."""

    layers: LayerProfile
    optimizer_s: list[float]
    link: Link


def for_samples(profile: Profile, num_samples: int) -> Profile:
    """Return the profile for micro-batches of another size; parameters and optimizer do not grow with it."""
    layers, scale = profile.layers, num_samples / profile.layers.num_samples

    def scaled(values: Sequence[float]) -> list[float]:
        return [value * scale for value in values]

    def scaled_bytes(values: Sequence[int]) -> list[int]:
        return [round(value * scale) for value in values]

    return replace(
        profile,
        layers=replace(
            layers,
            num_samples=num_samples,
            forward_s=scaled(layers.forward_s),
            backward_s=scaled(layers.backward_s),
            input_s=scaled(layers.input_s),
            weight_s=scaled(layers.weight_s),
            saved_bytes=scaled_bytes(layers.saved_bytes),
            put_off_bytes=scaled_bytes(layers.put_off_bytes),
            input_bytes=scaled_bytes(layers.input_bytes),
            skips=[[source, target, round(size * scale)] for source, target, size in layers.skips],
            selective_s=scaled(layers.selective_s),
            footprints={run: [_scaled(each, scale) for each in found] for run, found in layers.footprints.items()},
        ),
    )


def _scaled(footprint: Footprint, scale: float) -> Footprint:
    """Scale what belongs to samples; in a peak that is all but the gradients that stay."""

    def scaled(peaks: dict[str, Peak]) -> dict[str, Peak]:
        return {op: Peak(round(peak.activation_bytes * scale), peak.gradient_bytes) for op, peak in peaks.items()}

    return replace(
        footprint,
        kept_bytes=round(footprint.kept_bytes * scale),
        put_off_bytes=round(footprint.put_off_bytes * scale),
        peaks=scaled(footprint.peaks),
        first_peaks=scaled(footprint.first_peaks),
    )


def again_s(layers: LayerProfile, runs: Sequence[LayerRun]) -> list[float]:
    """Return the seconds that each layer's backward takes longer because its forward, or a part, runs again inside."""
    of_scores = layers.selective_s or [0.0] * len(layers.names)
    longer = {LayerRun.KEEP: [0.0] * len(layers.names), LayerRun.SELECTIVE: of_scores, LayerRun.AGAIN: layers.forward_s}
    return [longer[run][index] for index, run in enumerate(runs)]


def stage_costs(
    profile: Profile, layers_per_stage: Sequence[int], runs: Sequence[LayerRun] = ()
) -> dict[tuple[int, Op], float]:
    """Return the seconds of one action by (stage, op); `runs`, of layers, are KEEP if empty.

    What runs again inside a backward is part of it, or of its input's part.
    """
    layers = profile.layers
    longer_s = again_s(layers, runs) or [0.0] * len(layers.names)
    costs = {}
    for stage, (first, end) in enumerate(spans(layers_per_stage)):
        for op, seconds in (
            (Op.FORWARD, layers.forward_s),
            (Op.BACKWARD, [each + longer for each, longer in zip(layers.backward_s, longer_s, strict=True)]),
            (Op.INPUT_GRADIENT, [each + longer for each, longer in zip(layers.input_s, longer_s, strict=True)]),
            (Op.WEIGHT_GRADIENT, layers.weight_s),
            (Op.RECOMPUTE, layers.forward_s),
            (Op.OPTIMIZER, profile.optimizer_s),
        ):
            costs[stage, op] = sum(seconds[first:end])
    return costs


def _num_states(optimizer: OptimizerConfig) -> int:
    """Return how many tensors the size of the parameters an optimizer keeps."""
    return {"sgd": int(optimizer.momentum > 0), "adam": 2, "adamw": 2}[optimizer.name]


def parameter_bytes(layers: LayerProfile, chosen: Collection[int]) -> int:
    """Return the bytes of the parameters of some layers on one rank, where those that share one hold it once."""
    shared = zip(layers.ties, layers.tied_bytes, strict=False)  # older results know ties and not their bytes
    twice = sum(num_bytes * max(0, len(set(places) & set(chosen)) - 1) for places, num_bytes in shared)
    return sum(layers.parameter_bytes[layer] for layer in chosen) - twice


def weight_bytes(optimizer: OptimizerConfig, parameter_bytes: int) -> int:
    """Return what parameters, their gradients and the optimizer's state take, on whatever ranks they lie."""
    return (2 + _num_states(optimizer)) * parameter_bytes


def rank_memory(
    optimizer: OptimizerConfig,
    layers: LayerProfile,
    layers_per_stage: Sequence[int],
    schedule: Schedule,
    runs: Sequence[LayerRun] = (),
) -> list[StageMemory]:
    """Return each rank's memory by the model: parameters, as much for gradients, optimizer state, activations.

    It knows no transfers on their way and no interpreter: a rank needs at least this.
    """
    of_stage = [range(first, end) for first, end in spans(layers_per_stage)]
    memory = []
    for rank, peak in enumerate(peak_activation_bytes(schedule, stage_activations(layers, layers_per_stage, runs))):
        own = [layer for stage in schedule.stages_of_rank(rank) for layer in of_stage[stage]]
        parameters = parameter_bytes(layers, own)
        memory.append(
            StageMemory(
                parameters_bytes=parameters,
                gradients_bytes=parameters,
                optimizer_bytes=_num_states(optimizer) * parameters,
                activations_bytes=round(peak),
                allocator_peak_bytes=0,
                allocator_reserved_bytes=0,
            )
        )
    return memory


def transfer_times(profile: Profile, layers_per_stage: Sequence[int]) -> list[float]:
    """Return for each stage the seconds its input takes from another rank."""
    return [
        profile.link.transfer_s(profile.layers.input_bytes[first]) if first > 0 else 0.0
        for first, _ in spans(layers_per_stage)
    ]


def load_profile(config: RunConfig) -> Profile:
    """Return the costs that `profile=` names, or the synthetic model's own; raise ConfigError for what is unusable."""
    if config.profile is None:
        assert isinstance(config.model, SyntheticConfig)
        return _synthetic(config.model)
    path = Path(config.profile)
    profile = _from_result(path, config) if path.suffix == ".json" else _from_yaml(path, config.model.num_layers)
    if len(profile.layers.names) != config.model.num_layers:
        raise ConfigError(
            f"profile={path}: has {len(profile.layers.names)} layers: expected {config.model.num_layers}, "
            f"those of model={config.model.name}"
        )
    return profile


def _synthetic(model: SyntheticConfig) -> Profile:
    factors = [1.0] * (model.layers - 1) + [1.0 + model.imbalance]
    boundary = model.width * 4
    layers = LayerProfile(
        num_samples=1,
        names=["Sleep"] * model.layers,
        forward_s=[model.forward_s * factor for factor in factors],
        backward_s=[model.backward_s * factor for factor in factors],
        input_s=[model.backward_s * (1 - model.weight_share) * factor for factor in factors],
        weight_s=[model.backward_s * model.weight_share * factor for factor in factors],
        parameter_bytes=[(model.width + 1) * boundary] * model.layers,
        saved_bytes=[0] * model.layers,
        put_off_bytes=[2 * boundary] * model.layers,
        input_bytes=[boundary] * model.layers,
        saves_input=[True] * model.layers,
    )
    return Profile(layers, [0.0] * model.layers, Link())


def _from_result(path: Path, config: RunConfig) -> Profile:
    try:
        result = read_result(path)
        if result.profile is None or not result.repeats:
            raise ConfigError(f"profile={path}: status {result.status}: expected the result of a measured point")
        for key in ("model", "precision"):
            theirs, ours = getattr(result.config, key), getattr(config, key)
            if theirs != ours:
                raise ConfigError(f"profile={path}: is of {_named(key, theirs)}: expected {_named(key, ours)}")
        profile = profile_of(result)
        if profile is None:
            raise ConfigError(
                f"profile={path}: engine={result.config.engine} recorded no spans: expected an engine that does"
            )
        return profile
    except (ResultError, ValueError) as error:
        raise ConfigError(f"profile={error}") from error


def profile_of(result: RunResult) -> Profile | None:
    """Return the costs of a finished point by layer, None where it knows no layers or recorded no spans."""
    costs = action_costs([trace for repeat in result.repeats for trace in traces(result, repeat)])
    return _spread(result, result.profile, costs) if result.profile is not None and costs else None


def _named(key: str, value: Any) -> str:
    if not is_dataclass(value) or isinstance(value, type):
        return f"{key}={value}"
    return ", ".join(f"{key}.{name}={setting}" for name, setting in asdict(value).items() if name != "kind")


def _spread(result: RunResult, layers: LayerProfile, costs: dict[tuple[int, Op], float]) -> Profile:
    """Spread the stages' measured seconds over their layers, in proportion to the layers' own where those are known.

    A backward within which layers ran again is taken without that. One that was measured in one piece alone is cut as
    its layers' parts compare, in half where they were not timed; of one that was measured in parts alone, the parts are
    the whole.
    """
    forward_s: list[float] = []
    backward_s: list[float] = []
    input_s: list[float] = []
    weight_s: list[float] = []
    optimizer_s: list[float] = []
    unknown = [1.0] * len(layers.names)
    runs = result.runs or [LayerRun.KEEP] * len(layers.names)
    for stage, (first, end) in enumerate(spans(result.layers_per_stage)):

        def spread(op: Op, shares: Sequence[float], stage: int = stage, own: slice = slice(first, end)) -> list[float]:
            return _divided(costs.get((stage, op), 0.0), (shares or unknown)[own])

        forward_s += spread(Op.FORWARD, layers.forward_s)
        for op in (Op.BACKWARD, Op.INPUT_GRADIENT):
            if (stage, op) in costs:
                costs[stage, op] = max(0.0, costs[stage, op] - _longer_s(layers, runs, forward_s[first:end], first))
        optimizer_s += spread(Op.OPTIMIZER, [float(size) for size in layers.parameter_bytes])
        whole = spread(Op.BACKWARD, layers.backward_s)
        of_input = spread(Op.INPUT_GRADIENT, layers.input_s)
        of_weight = spread(Op.WEIGHT_GRADIENT, layers.weight_s)
        if (stage, Op.INPUT_GRADIENT) not in costs:
            timed_s = zip(layers.input_s or unknown, layers.weight_s or unknown, strict=True)
            shares = list(timed_s)[first:end]
            cut = [_divided(seconds, share) for seconds, share in zip(whole, shares, strict=True)]
            of_input, of_weight = [i for i, _ in cut], [w for _, w in cut]
        if (stage, Op.BACKWARD) not in costs:
            whole = [i + w for i, w in zip(of_input, of_weight, strict=True)]
        backward_s, input_s, weight_s = backward_s + whole, input_s + of_input, weight_s + of_weight
    timed = replace(layers, forward_s=forward_s, backward_s=backward_s, input_s=input_s, weight_s=weight_s)
    return Profile(timed, optimizer_s, _link(result, layers))


def _longer_s(layers: LayerProfile, runs: Sequence[LayerRun], forward_s: Sequence[float], first: int) -> float:
    """Return what a stage's backward took longer since layers of it ran again inside, by its forward as measured."""
    measured = replace(layers, forward_s=[0.0] * first + list(forward_s))
    return sum(again_s(measured, runs[: first + len(forward_s)])[first:])


def _divided(total: float, shares: Sequence[float]) -> list[float]:
    """Return `total` in proportion to the shares, evenly where those are all 0."""
    whole = sum(shares)
    return [total * share / whole if whole > 0 else total / len(shares) for share in shares]


def _link(result: RunResult, layers: LayerProfile) -> Link:
    """Return the link as measured: medians over all transfers between ranks. A run on one rank has none: free."""
    crossed = []
    first_layers = [first for first, _ in spans(result.layers_per_stage)]
    for repeat in result.repeats:
        for record in repeat.ranks:
            stages = result.schedule.stages_of_rank(record.rank)
            for stage, transfer_s, latency_s in zip(stages, record.transfer_s, record.latency_s, strict=True):
                if transfer_s > 0:
                    crossed.append((latency_s, transfer_s, layers.input_bytes[first_layers[stage]]))
    if not crossed:
        return Link()
    latency_s, transfer_s, num_bytes = (median(column) for column in zip(*crossed, strict=True))
    return Link.through(latency_s, num_bytes, transfer_s)


_BYTES = ("parameter_bytes", "saved_bytes", "put_off_bytes", "input_bytes")
_YAML_KEYS = ("num_samples", "forward_s", "backward_s", "input_s", "weight_s", "optimizer_s", *_BYTES,
              "latency_s", "bytes_per_s")  # fmt: skip


def _from_yaml(path: Path, num_layers: int) -> Profile:
    """Read a file of per-layer costs, each one number for all layers or a list; see the README for the keys."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"profile={path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not set(content) <= set(_YAML_KEYS):
        raise ConfigError(f"profile={path}: expected keys of {', '.join(_YAML_KEYS)}")
    costs = {str(key): value for key, value in content.items()}

    def layers_of(key: str, default: list[float] | None = None) -> list[float]:
        value: Any = costs.get(key, default)
        values: list[Any] = value if isinstance(value, list) else [value] * num_layers
        if not all(type(each) in (int, float) and 0 <= each < float("inf") for each in values):
            raise ConfigError(f"profile={path}: {key}={value}: expected a number of at least 0, or a list of such")
        if len(values) != num_layers:
            raise ConfigError(f"profile={path}: {key}: has {len(values)} numbers: expected {num_layers}, one a layer")
        return [float(each) for each in values]

    forward_s = layers_of("forward_s")
    if not sum(forward_s) > 0:
        raise ConfigError(f"profile={path}: forward_s={costs['forward_s']}: expected some seconds above 0")
    if "input_s" in costs or "weight_s" in costs:
        input_s, weight_s = layers_of("input_s"), layers_of("weight_s")
        backward_s = layers_of("backward_s", [a + b for a, b in zip(input_s, weight_s, strict=True)])
    else:
        backward_s = layers_of("backward_s")
        input_s = weight_s = [seconds / 2 for seconds in backward_s]
    zeros = [0.0] * num_layers
    sizes = {key: [round(size) for size in layers_of(key, zeros)] for key in _BYTES}
    return Profile(
        layers=LayerProfile(
            num_samples=_num_samples(path, costs),
            names=["layer"] * num_layers,
            forward_s=forward_s,
            backward_s=backward_s,
            input_s=input_s,
            weight_s=weight_s,
            saves_input=[True] * num_layers,
            parameter_bytes=sizes["parameter_bytes"],
            saved_bytes=sizes["saved_bytes"],
            put_off_bytes=sizes["put_off_bytes"],
            input_bytes=sizes["input_bytes"],
        ),
        optimizer_s=layers_of("optimizer_s", zeros),
        link=Link(_number(path, costs, "latency_s", 0.0), _number(path, costs, "bytes_per_s", float("inf"), above=0)),
    )


def _num_samples(path: Path, costs: dict[str, Any]) -> int:
    value = costs.get("num_samples", 1)
    if type(value) is not int or value < 1:
        raise ConfigError(f"profile={path}: num_samples={value}: expected a whole number of at least 1")
    return value


def _number(path: Path, costs: dict[str, Any], key: str, default: float, above: float = -1.0) -> float:
    value = costs.get(key, default)
    if type(value) not in (int, float) or not value >= 0 or value <= above or (key in costs and value == float("inf")):
        wanted = "above 0" if above == 0 else "of at least 0"
        raise ConfigError(f"profile={path}: {key}={value}: expected a number {wanted}")
    return float(value)
