"""What stages hold, put together from what their layers hold and allocate alone (see `schedule.memory` for the ranks).

In a forward every layer begins on top of what those before it keep; in a backward, on top of what those before it have
kept, with the stage's own output gradient still there, and each layer lets go of what it kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipebench.record import Footprint, LayerProfile, LayerRun
from pipebench.schedule.action import Op
from pipebench.schedule.memory import Peak, StageActivations


def spans(layers_per_stage: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first layer of each stage, and the one after its last."""
    bounds = [sum(layers_per_stage[:stage]) for stage in range(len(layers_per_stage) + 1)]
    return list(pairwise(bounds))


def stage_activations(
    layers: LayerProfile, layers_per_stage: Sequence[int], runs: Sequence[LayerRun] = ()
) -> list[StageActivations]:
    """Return what each stage keeps of one micro-batch and needs for it, in bytes; `runs`, of layers, are KEEP if empty.

    Stage 0 reads the mini-batch itself, so its input costs nothing. A stage that can put nothing off keeps everything
    until the weights' part, unless it computes all with the input's because layers of it run again. Where nothing was
    measured but what autograd saves, an action has no peak of its own beyond the layer that runs again.
    """
    runs = list(runs) or [LayerRun.KEEP] * len(layers.names)
    return [
        _with_skips(_together(list(_alone(layers, first, end, runs))), layers, range(first, end))
        for first, end in spans(layers_per_stage)
    ]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer in its place: `input_bytes` are held while it runs, `held_bytes` from its forward to its backward.

    `gradient_bytes` are those of its output's gradient, which on the last layer of a stage comes from the next stage.
    """

    run: LayerRun
    footprint: Footprint
    input_bytes: int
    held_bytes: int
    gradient_bytes: int
    is_known: bool


def _alone(layers: LayerProfile, first: int, end: int, runs: Sequence[LayerRun]) -> Iterator[_Layer]:
    sizes = [0, *layers.input_bytes[1:], 0]  # the mini-batch is there anyway, and a loss is one number
    before: Footprint | None = None
    for index in range(first, end):
        footprint = footprint_of(layers, index, runs[index])
        holds_input = index == first or footprint.keeps_input or (before is not None and before.keeps_output)
        held = footprint.kept_bytes + holds_input * sizes[index]
        if index + 1 == end and footprint.keeps_output:
            held += sizes[end]
        yield _Layer(runs[index], footprint, sizes[index], held, sizes[index + 1], bool(layers.footprints))
        before = footprint


def footprint_of(layers: LayerProfile, index: int, run: LayerRun) -> Footprint:
    """Return what was measured of a layer; without that, what autograd saves, anew where the layer runs again."""
    if layers.footprints:
        return layers.footprints[run.value][index]
    kept, put_off = layers.saved_bytes[index], layers.put_off_bytes[index]
    plain = Footprint(kept, layers.saves_input[index], False, put_off, {}, {}, {})
    if run != LayerRun.AGAIN:
        return plain
    anew = {"B": Peak(kept), "I": Peak(kept)}
    return replace(plain, kept_bytes=0, keeps_input=True, peaks=anew, first_peaks=anew)


def _together(layers: Sequence[_Layer]) -> StageActivations:
    full = sum(layer.held_bytes for layer in layers)
    put_off = sum(layer.footprint.put_off_bytes for layer in layers)
    from_before = layers[0].input_bytes
    again = any(layer.run == LayerRun.AGAIN for layer in layers)
    kept = StageActivations(full, from_before, put_off or (0 if again else full))
    if not again and not layers[0].is_known:
        return kept
    forward = _most(_forward(layers))
    peaks, first_peaks = ({Op.FORWARD: forward, Op.RECOMPUTE: _above(forward, from_before)} for _ in range(2))
    for op in (Op.BACKWARD, Op.INPUT_GRADIENT, *([Op.WEIGHT_GRADIENT] if put_off else [])):
        peaks[op] = _most(_back(layers, op, is_first=False))
        first_peaks[op] = _most(_back(layers, op, is_first=True))
    gradients = {
        op: sum(layer.footprint.gradient_bytes.get(op.value, 0) for layer in layers)
        for op in (Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
    }
    return replace(kept, peaks=peaks, first_peaks=first_peaks, gradient_bytes=gradients)


def _with_skips(alone: StageActivations, layers: LayerProfile, own: range) -> StageActivations:
    """Add what skips bring: a tensor from an earlier stage is held until its backward, and a later stage's gradient of
    one comes with that of the output."""
    entering = sum(size for source, target, size in layers.skips if source not in own and target in own)
    coming_back = sum(size for source, target, size in layers.skips if source in own and target not in own)
    added = {Op.FORWARD: entering, Op.BACKWARD: coming_back, Op.INPUT_GRADIENT: coming_back}

    def with_added(peaks: Mapping[Op, Peak]) -> dict[Op, Peak]:
        return {
            op: replace(peak, activation_bytes=peak.activation_bytes + added.get(op, 0)) for op, peak in peaks.items()
        }

    return replace(
        alone,
        full_bytes=alone.full_bytes + entering,
        input_bytes=alone.input_bytes + entering,
        peaks=with_added(alone.peaks),
        first_peaks=with_added(alone.first_peaks),
    )


def _forward(layers: Sequence[_Layer]) -> Iterator[Peak]:
    """Yield the peak in each layer, above what was there before the stage's input came."""
    held = 0
    for layer in layers:
        peak = layer.footprint.peaks.get("F", Peak())
        yield Peak(held + layer.input_bytes + peak.activation_bytes)
        held += layer.held_bytes


def _back(layers: Sequence[_Layer], op: Op, is_first: bool) -> Iterator[Peak]:
    """Yield the peak in each layer, above what was there before the stage's output gradient came."""
    arrived = layers[-1].gradient_bytes if op != Op.WEIGHT_GRADIENT else 0
    held, left = arrived, 0
    for layer in reversed(layers):
        footprint = layer.footprint
        peak = (footprint.first_peaks if is_first else footprint.peaks).get(op.value, Peak())
        gradient = layer.gradient_bytes if layer is not layers[-1] and op != Op.WEIGHT_GRADIENT else 0
        yield Peak(held + gradient + peak.activation_bytes, left + peak.gradient_bytes)
        held += {
            Op.BACKWARD: -layer.held_bytes,
            Op.INPUT_GRADIENT: footprint.put_off_bytes - layer.held_bytes,
            Op.WEIGHT_GRADIENT: -footprint.put_off_bytes,
        }[op]
        if is_first:
            left += footprint.gradient_bytes.get(op.value, 0)


def _most(peaks: Iterator[Peak]) -> Peak:
    return max(peaks, key=lambda peak: peak.total_bytes)


def _above(peak: Peak, num_bytes: float) -> Peak:
    return Peak(peak.activation_bytes - num_bytes)
