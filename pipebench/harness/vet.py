"""Look at a model or data of a user's own before anything starts, in a worker: what must be known of it, and whether it
can be cut into stages at all.

Each layer runs once on the meta device, with the shapes of the data's first micro-batch, so this takes no time and no
memory, but for functions that do not work there. What is found wrong is one line that names the layer and a way out.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipebench.config import CustomConfig, CustomDataConfig, DataConfig, HfConfig, ModelConfig, RunConfig
from pipebench.data import batches
from pipebench.data.batch import MiniBatch
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.errors import ConfigError
from pipebench.harness.jobs import VetJob, Vetted
from pipebench.harness.launch import Progress, Report
from pipebench.layer import declared_by
from pipebench.models import layer_sequence
from pipebench.models.custom import all_layers
from pipebench.models.hf import with_defaults
from pipebench.models.layers import LayerSequence, layout_of
from pipebench.target import source_of
from pipebench.target import told as told_error
from pipebench.values import Value, is_value, moved, tensors_of, told


def vet(job: VetJob, report: Report) -> Vetted:
    """Return model and data with all that the bench must know of them, or why they cannot be run."""
    report(Progress("looking at the model"))
    config = job.config
    try:
        config = dataclasses.replace(config, model=_known_model(config), data=_known_data(config.data))
        model = layer_sequence(config.model)
        layout_of(model)
        _run(config, model, _first_batch(config))
    except ConfigError as error:
        return Vetted(config.model, config.data, str(error))
    return Vetted(config.model, config.data)


def _known_model(config: RunConfig) -> ModelConfig:
    match config.model:
        case CustomConfig() as custom:
            assert custom.target is not None
            with torch.device("meta"):
                num_layers = len(all_layers(custom, config.seed))
            return dataclasses.replace(custom, num_layers=num_layers, source=source_of("model.target", custom.target))
        case HfConfig() as hf:
            return with_defaults(hf)
        case built_in:
            return built_in  # type: ignore[no-any-return]


def _known_data(data: DataConfig) -> DataConfig:
    if not isinstance(data, CustomDataConfig):
        return data
    assert data.target is not None
    return dataclasses.replace(data, source=source_of("data.target", data.target))


def _first_batch(config: RunConfig) -> MiniBatch:
    """Every rank draws its own, so the numbers must come from step and seed alone."""
    draw = batches(config)
    first, again = draw(0), draw(0)
    pairs = ((first.inputs, again.inputs), (first.targets, again.targets))
    for what, (one, other) in zip(("inputs", "targets"), pairs, strict=True):
        if not all(map(torch.equal, tensors_of(one), tensors_of(other))):
            raise ConfigError(
                f"data.target={config.data.target}: other {what} when asked for step 0 again: expected numbers that "
                "depend on step and seed alone, from torch.Generator().manual_seed(seed + step)"
            )
    return first


def _run(config: RunConfig, model: LayerSequence, batch: MiniBatch) -> None:
    """Pass micro-batches of every size, and the whole mini-batch, through layers without numbers."""
    with torch.device("meta"):
        layers = model.build(range(model.num_layers), config.seed)
    for size in sorted({*micro_batch_sizes(config.batch, config.micro), config.batch}):
        piece = batch.split([size, config.batch - size])[0] if size < config.batch else batch
        output = _through(layers, moved(piece.inputs, "meta"), size)
        _check_loss(config, model, output, piece)


def _through(layers: Sequence[nn.Module], value: Value, num_samples: int) -> Value:
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for index, layer in enumerate(layers):
            declared = declared_by(layer)
            who = f"layer {index} ({type(layer).__name__})"
            taken = (value, *(kept.pop(name) for name in declared.pops))
            versions = _versions(taken)
            result = _result_of(who, layer, taken)
            if _versions(taken) != versions:
                raise ConfigError(
                    f"{who} changes its input in place, which a recompute needs again: expected inplace=False, or one "
                    "nn.Sequential of it and the layer before it"
                )
            value = _value_of(who, result, declared.stashes, kept)
            for tensor in (*tensors_of(value), *kept.values()):
                if tensor.dim() == 0 or len(tensor) != num_samples:
                    raise ConfigError(
                        f"{who} returns {told(tensor)} for {num_samples} samples: expected the samples first, also in "
                        "what it stashes"
                    )
    return value


def _value_of(who: str, result: object, stashed: Sequence[str], kept: dict[str, Tensor]) -> Value:
    """Take apart what a layer returned: its value, and what it stashes."""
    if stashed:
        if not isinstance(result, tuple) or len(result) != 1 + len(stashed):
            raise ConfigError(
                f"{who} returns {told(result)}: expected a tuple of its value and of a tensor for each of "
                f"stashes={tuple(stashed)}"
            )
        result, *tensors = result
        kept.update(zip(stashed, tensors, strict=True))
    if not is_value(result) or not all(isinstance(tensor, Tensor) for tensor in kept.values()):
        raise ConfigError(
            f"{who} returns {told(result)}: expected a tensor or a flat tuple of tensors; wrap it in a module whose "
            "forward returns those of its tensors that the next layer takes"
        )
    return result  # type: ignore[return-value]


def _versions(values: Sequence[Value]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [tensor._version for value in values for tensor in tensors_of(value)]


def _result_of(who: str, layer: nn.Module, values: tuple[Value, ...]) -> object:
    """Call a layer on the meta device; where that fails, a run with zeros tells whose fault it is."""
    try:
        return layer(*values)
    except Exception as error:
        taken = " and ".join(map(told, values))
        try:
            _for_real(layer)(*(_zeros(value) for value in values))
        except Exception as real:
            raise ConfigError(
                f"{who} cannot take {taken}, which is all it is called with: {told_error(real)}: expected a layer for "
                "what the one before it returns, or pops = (name,) for a tensor of an earlier one"
            ) from real
        raise ConfigError(
            f"{who} has shapes or branches that depend on data, or makes tensors on another device than its input's: "
            f"{told_error(error)}: expected what follows from its input's shape alone, and device=x.device"
        ) from error


def _for_real(layer: nn.Module) -> nn.Module:
    """Return the layer on the CPU, with zeros for numbers."""
    real = copy.deepcopy(layer).to_empty(device="cpu")
    for tensor in real.state_dict().values():
        tensor.zero_()
    return real


def _zeros(value: Value) -> Value:
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    return tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in value)


def _check_loss(config: RunConfig, model: LayerSequence, output: Value, piece: MiniBatch) -> None:
    """Call the loss with made-up numbers: whole and cut in two, for only a mean is the same for any M."""
    name = f"model.loss={config.model.loss}" if isinstance(config.model, CustomConfig) else "the loss"
    made_up, targets = _noise(output), piece.targets
    try:
        loss = model.loss(made_up, targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise ConfigError(f"{name} returns {told(loss)}: expected one number, the mean over the samples")
        halves = MiniBatch(made_up, targets).split(micro_batch_sizes(len(piece), min(2, len(piece))))
        counts = [float(model.count(half.targets)) for half in halves]
        parts = [float(model.loss(half.inputs, half.targets)) * n for half, n in zip(halves, counts, strict=True) if n]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} cannot take what the last layer returns, {told(output)}, with targets {told(targets)}: "
            f"{told_error(error)}"
        ) from error
    if sum(counts) and not math.isclose(float(loss), mean := sum(parts) / sum(counts), rel_tol=1e-3, abs_tol=1e-6):
        raise ConfigError(
            f"{name} is {float(loss):.4g} of {len(piece)} samples at once and {mean:.4g} as a mean over two parts: "
            "expected a mean over the samples, or a function with an attribute count(targets): over how many things"
        )


def _noise(value: Value) -> Value:
    if isinstance(value, Tensor):
        random = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
        return random.to(value.dtype) if value.is_floating_point() else _zeros(value)
    return tuple(tensor for one in value for tensor in tensors_of(_noise(one)))
