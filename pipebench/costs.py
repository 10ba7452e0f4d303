"""What stages cost, worked out from what their layers cost: search, simulation and memory model start from it.

Times and activations are taken to grow in proportion to the samples of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from pipebench.config import RunConfig, SyntheticConfig
from pipebench.errors import ConfigError, ResultError
from pipebench.metrics import action_costs
from pipebench.record import LayerProfile, RunResult, read_result, traces
from pipebench.schedule.action import Op
from pipebench.schedule.memory import StageActivations
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
        ),
    )


def stage_costs(profile: Profile, layers_per_stage: Sequence[int]) -> dict[tuple[int, Op], float]:
    """Return the seconds of one action by (stage, op)."""
    layers = profile.layers
    costs = {}
    for stage, (first, end) in enumerate(_spans(layers_per_stage)):
        for op, seconds in (
            (Op.FORWARD, layers.forward_s),
            (Op.BACKWARD, layers.backward_s),
            (Op.INPUT_GRADIENT, layers.input_s),
            (Op.WEIGHT_GRADIENT, layers.weight_s),
            (Op.RECOMPUTE, layers.forward_s),
            (Op.OPTIMIZER, profile.optimizer_s),
        ):
            costs[stage, op] = sum(seconds[first:end])
    return costs


def stage_activations(layers: LayerProfile, layers_per_stage: Sequence[int]) -> list[StageActivations]:
    """Return what each stage keeps of one micro-batch, in bytes.

    Stage 0 reads the mini-batch itself, so its input costs nothing. A stage that can put nothing off keeps everything
    until the weights' part.
    """
    stages = []
    for first, end in _spans(layers_per_stage):
        kept = sum(layers.saved_bytes[first:end])
        kept += sum(layers.input_bytes[i] for i in range(first + 1, end) if layers.saves_input[i])
        from_before = layers.input_bytes[first] if first > 0 else 0
        put_off = sum(layers.put_off_bytes[first:end])
        stages.append(StageActivations(kept + from_before, from_before, put_off or kept + from_before))
    return stages


def transfer_times(profile: Profile, layers_per_stage: Sequence[int]) -> list[float]:
    """Return for each stage the seconds its input takes from another rank."""
    return [
        profile.link.transfer_s(profile.layers.input_bytes[first]) if first > 0 else 0.0
        for first, _ in _spans(layers_per_stage)
    ]


def _spans(layers_per_stage: Sequence[int]) -> list[tuple[int, int]]:
    bounds = [sum(layers_per_stage[:stage]) for stage in range(len(layers_per_stage) + 1)]
    return list(pairwise(bounds))


def load_profile(config: RunConfig) -> Profile:
    """Return the costs that `profile=` names, or the synthetic model's own; raise ConfigError for what is unusable."""
    if config.profile is None:
        assert isinstance(config.model, SyntheticConfig)
        return _synthetic(config.model)
    path = Path(config.profile)
    profile = _from_result(path) if path.suffix == ".json" else _from_yaml(path, config.model.num_layers)
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


def _from_result(path: Path) -> Profile:
    try:
        result = read_result(path)
        if result.profile is None or not result.repeats:
            raise ConfigError(f"profile={path}: status {result.status}: expected the result of a measured point")
        costs = action_costs([trace for repeat in result.repeats for trace in traces(result, repeat)])
        return _spread(result, result.profile, costs)
    except (ResultError, ValueError) as error:
        raise ConfigError(f"profile={error}") from error


def _spread(result: RunResult, layers: LayerProfile, costs: dict[tuple[int, Op], float]) -> Profile:
    """Spread the stages' measured seconds over their layers, in proportion to the layers' own where those are known."""
    if not costs:
        raise ConfigError(
            f"profile: engine={result.config.engine} recorded no spans: expected a run of engine=pipebench"
        )
    spans = _spans(result.layers_per_stage)

    def spread(op: Op, shares: Sequence[float]) -> list[float]:
        spread_s: list[float] = []
        for stage, (first, end) in enumerate(spans):
            own = list(shares[first:end]) if shares and sum(shares[first:end]) > 0 else [1.0] * (end - first)
            spread_s += [costs.get((stage, op), 0.0) * share / sum(own) for share in own]
        return spread_s

    split = any(op == Op.INPUT_GRADIENT for _, op in costs)
    if split:
        input_s, weight_s = spread(Op.INPUT_GRADIENT, layers.input_s), spread(Op.WEIGHT_GRADIENT, layers.weight_s)
        backward_s = [a + b for a, b in zip(input_s, weight_s, strict=True)]
    else:
        backward_s = spread(Op.BACKWARD, layers.backward_s)
        timed = zip(layers.input_s, layers.weight_s, strict=True) if layers.input_s else [(1.0, 1.0)] * len(backward_s)
        share = [of_weight / (of_input + of_weight) if of_weight else 0.0 for of_input, of_weight in timed]
        weight_s = [seconds * part for seconds, part in zip(backward_s, share, strict=True)]
        input_s = [seconds - part for seconds, part in zip(backward_s, weight_s, strict=True)]
    crossing = [t for repeat in result.repeats for rank in repeat.ranks for t in rank.transfer_s if t > 0]
    return Profile(
        layers=LayerProfile(
            num_samples=layers.num_samples,
            names=layers.names,
            forward_s=spread(Op.FORWARD, layers.forward_s),
            backward_s=backward_s,
            input_s=input_s,
            weight_s=weight_s,
            parameter_bytes=layers.parameter_bytes,
            saved_bytes=layers.saved_bytes,
            put_off_bytes=layers.put_off_bytes,
            input_bytes=layers.input_bytes,
            saves_input=layers.saves_input,
        ),
        optimizer_s=spread(Op.OPTIMIZER, layers.parameter_bytes),
        link=Link(latency_s=median(crossing) if crossing else 0.0),
    )


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
        if not all(type(each) in (int, float) and each >= 0 for each in values):
            raise ConfigError(f"profile={path}: {key}={value}: expected a number of at least 0, or a list of such")
        if len(values) != num_layers:
            raise ConfigError(f"profile={path}: {key}: has {len(values)} numbers: expected {num_layers}, one a layer")
        return [float(each) for each in values]

    forward_s = layers_of("forward_s")
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
            num_samples=int(_number(path, costs, "num_samples", 1, above=0)),
            names=["layer"] * num_layers,
            forward_s=forward_s,
            backward_s=backward_s,
            input_s=input_s,
            weight_s=weight_s,
            saves_input=[True] * num_layers,
            **sizes,
        ),
        optimizer_s=layers_of("optimizer_s", zeros),
        link=Link(_number(path, costs, "latency_s", 0.0), _number(path, costs, "bytes_per_s", float("inf"), above=0)),
    )


def _number(path: Path, costs: dict[str, Any], key: str, default: float, above: float = -1.0) -> float:
    value = costs.get(key, default)
    if type(value) not in (int, float) or value < 0 or value <= above:
        wanted = "above 0" if above == 0 else "of at least 0"
        raise ConfigError(f"profile={path}: {key}={value}: expected a number {wanted}")
    return float(value)
