"""One rank of one point: build the engine, check its gradients, warm up, measure, and deliver the record."""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from pipebench.data import batches
from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import specs_between
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.optimizer import make_optimizer
from pipebench.engine.pipeline import Pipeline, layers_of
from pipebench.engine.shared_memory import Room
from pipebench.engine.stage import Bundle, Bundles, Loss, Stage, TensorSpec
from pipebench.engine.stopwatch import CudaStopwatch, HostStopwatch
from pipebench.engine.transport import Transport
from pipebench.engine.update import LossScale, UpdateRules, probe_scale
from pipebench.engine.whereabouts import Whereabouts
from pipebench.errors import LossError
from pipebench.harness.evaluating import Evaluations
from pipebench.harness.gate import largest_error, plain_gradients
from pipebench.harness.jobs import RankJob
from pipebench.harness.launch import Progress, Report
from pipebench.harness.memory import measure_memory, peak_rss_bytes, reset_peaks
from pipebench.harness.saving import load_layers, save_layer
from pipebench.harness.setting import autocast_of, claim_cores
from pipebench.harness.update_rules import update_rules
from pipebench.harness.wire import EMPTY_TENSOR, carrier_of, join_group, one_way_time, transport_between
from pipebench.models import layer_sequence
from pipebench.models.layers import LayerSequence, build_layers, layout_of, skips_between
from pipebench.peers.abilities import follows_rows, num_processes
from pipebench.peers.protocol import Engine, Parts
from pipebench.peers.registry import build_engine
from pipebench.peers.single import SingleProcess
from pipebench.record import RankRecord, UpdateRecord
from pipebench.saved import SavedLayer, read_saved, saved_after, write_saved
from pipebench.schedule.action import Row
from pipebench.values import tensors_of

OWN_LOOPS = ("pipebench", "single")
"""Engines that commit batch norm's deferred statistics; the others know batch norm as plain PyTorch has it."""

STEADY_WINDOW = 3
STEADY_FRACTION = 0.02


def measure_rank(job: RankJob, report: Report) -> tuple[RankRecord, Row]:
    """Run one rank's part of a point and return its record and the actions that its spans are of.

    Runs in a worker. Raise LossError or StageError for what goes wrong.
    """
    config, rank = job.config, job.rank
    phases = Phases(report)
    with phases("starting"):
        bench, device = set_up(job, report)
        engine, transport = bench.build_engine(device)
    with phases("checking gradients"):
        error = bench.gradient_error(engine, device) if config.gate == "on" else None
    first_step = 0
    if config.load is not None:
        with phases("loading"):
            first_step = bench.load(engine, Path(config.load))
    evaluations = bench.evaluations(engine, device)
    run = Steps(engine, bench.mini_batch, device, phases, first_step, evaluations.after)
    with phases("warming up"):
        warmup_s, steady = run.until_steady(config.warmup)
    with phases("timing transfers"):
        transfer_s, latency_s = bench.transfer_times(transport) if follows_rows(config) else ([], [])
    reset_peaks(device)
    with phases("measuring"), garbage_frozen():
        step_s, spans = run.timed(config.steps)
    rss = peak_rss_bytes()
    evaluations.after_last(run.step)
    if job.save_in:
        with phases("saving"):
            bench.save(engine, Path(job.save_in), run.step, phases)
    with phases("profiling memory"):
        batch = bench.mini_batch(run.step).to(str(device))
        memory = measure_memory(
            lambda: engine.accumulate(run.step, batch),
            _parameters(engine),
            engine.optimizers,
            engine.held_bytes(),
            device,
        )
    with phases("leaving"):
        dist.barrier()
        dist.destroy_process_group()
    record = RankRecord(
        rank=rank,
        warmup_step_s=warmup_s,
        step_s=step_s,
        steady=steady,
        losses=run.losses if rank == 0 else [],
        grad_rel_error=error,
        transfer_s=transfer_s,
        latency_s=latency_s,
        spans=spans,
        memory=memory,
        peak_rss_bytes=rss,
        phases_s=phases.seconds,
        sent_bytes=engine.sent_bytes,
        first_step=first_step,
        evaluations=evaluations.found if rank == 0 else [],
        updates=run.updates if rank == 0 and any(run.updates) else [],
    )
    return record, run.row


def set_up(job: RankJob, report: Report) -> tuple["Bench", torch.device]:
    """Join the group and claim the rank's cores; return what engines are built from, and on which device."""
    config = job.config
    # First the group: its threads must stay free to run wherever a core is idle. Pinned beside the thread that
    # computes, they delivered tensors up to 17 ms late.
    store = join_group(config, job.rank, num_processes(config), job.store)
    device = claim_cores(config, job.cores, job.rank)
    return Bench(job, layer_sequence(config.model), batches(config), store, report.whereabouts), device


class Phases:
    """Reports what is going on and keeps how long each phase took."""

    def __init__(self, report: Report) -> None:
        self.seconds: dict[str, float] = {}
        self._report = report
        self._name = ""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._name = name
        self._report(Progress(name))
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began

    def step_done(self, done: int, total: int, step_s: float) -> None:
        self._report(Progress(self._name, done, total, step_s))

    def layer_done(self, done: int, total: int) -> None:
        self._report(Progress(self._name, done, total))


class Bench:
    """One rank's share of a point, before any engine: what to build and what to check it against."""

    def __init__(
        self,
        job: RankJob,
        model: LayerSequence,
        mini_batch: Callable[[int], MiniBatch],
        store: Store,
        whereabouts: Whereabouts,
    ) -> None:
        self.mini_batch = mini_batch
        self._job = job
        self._model = model
        self._store = store
        self._whereabouts = whereabouts
        self._sizes = micro_batch_sizes(job.config.batch, job.config.micro)
        self._bundles: Bundles = {}
        self._num_agreed = 0

    def build_engine(self, device: torch.device) -> tuple[Engine, Transport]:
        """Build the layers this process is to hold and the configured engine around them."""
        parts = self.parts(device)
        return build_engine(parts), parts.transport

    def parts(self, device: torch.device) -> Parts:
        """Build the layers this process is to hold, and what else an engine is given."""
        job = self._job
        pipelined = follows_rows(job.config)
        numbers = job.schedule.stages_of_rank(job.rank) if pipelined else range(job.schedule.num_stages)
        stages = self._build_stages(numbers, device)
        if pipelined:
            self._bundles = self._agree_on_bundles(stages, self._sizes)
        return Parts(
            job.config,
            job.schedule,
            job.rank,
            device,
            stages,
            self._bundles,
            partial(make_optimizer, job.config.optimizer),
            self._update_rules(stages, device),
            self._transport(device),
            CudaStopwatch() if device.type == "cuda" else HostStopwatch(),
            self._whereabouts,
            partial(self._agree_on_bundles, stages),
        )

    def _build_stages(self, numbers: Sequence[int], device: torch.device) -> dict[int, Stage]:
        """Build stages; all at once, for parameters that are tied between them are one."""
        job = self._job
        first = [sum(job.layers_per_stage[:number]) for number in numbers]
        spans = [range(begin, begin + job.layers_per_stage[n]) for begin, n in zip(first, numbers, strict=True)]
        layers = iter(build_layers(self._model, [*itertools.chain(*spans)], job.config.seed))
        return {
            number: self._build_stage(number, list(itertools.islice(layers, len(span))), span.start, device)
            for number, span in zip(numbers, spans, strict=True)
        }

    def _build_stage(self, number: int, layers: list[nn.Module], first: int, device: torch.device) -> Stage:
        job, config = self._job, self._job.config
        is_last = number == job.schedule.num_stages - 1
        return Stage(
            layers,
            first,
            config.seed,
            device,
            autocast_of(config),
            Loss(self._model.loss, self._model.count, self._model.metrics) if is_last else None,
            job.schedule.splits_backward(number),
            config.batch_norm == "deferred" and config.engine in OWN_LOOPS,
            job.runs[first : first + len(layers)],
        )

    def gradient_error(self, engine: Engine, device: torch.device) -> float:
        """Return the largest relative gradient error of one mini-batch; see `gate`. Gradients are dropped.

        Where a GPU cannot hold the whole model, engine and reference both run on the host for this check:
        dropout draws other numbers there, so they must not be mixed.
        """
        job, config = self._job, self._job.config
        if not _whole_model_fits(job, device):
            device = torch.device("cpu")
            engine, _ = self.build_engine(device)
        batch = self.mini_batch(0).to(str(device))
        with _kept_buffers(engine):
            engine.accumulate(0, batch)
        reference = None
        if job.rank == 0:
            factor = probe_scale(config.optimizer)
            reference = plain_gradients(
                self._model, batch, config.micro, config.seed, 0, device, autocast_of(config), factor
            )
        error = largest_error(engine.gradients(), reference, self._owners(), job.rank)
        for parameter in _parameters(engine):
            parameter.grad = None
        return error

    def evaluations(self, engine: Engine, device: torch.device) -> Evaluations:
        return Evaluations(engine, self._job.config, self._model.metrics, device)

    def save(self, engine: Engine, folder: Path, step: int, phases: Phases) -> None:
        """Write this rank's layers, and on rank 0 what is to be said of all of them after so many training steps."""
        config, layout = self._job.config, layout_of(self._model)
        waiting = engine.gradients() if step % config.optimizer.accumulate else {}
        for done, (index, layer) in enumerate(engine.layers.items(), start=1):
            written = save_layer(folder, index, layer, engine.optimizers, waiting.get(index, ()), layout)
            self._store.set(f"saved layer {index}", written)
            phases.layer_done(done, len(engine.layers))
        if self._job.rank == 0:
            hashes = [self._store.get(f"saved layer {index}").decode() for index in range(len(layout.names))]
            layers = [SavedLayer(*each) for each in zip(layout.names, hashes, strict=True)]
            saved, scale = saved_after(step, config, layers), _loss_scale(engine)
            if scale is not None:
                saved = dataclasses.replace(saved, loss_scale=scale.value, num_good=scale.num_good)
            write_saved(folder, saved)

    def load(self, engine: Engine, folder: Path) -> int:
        """Set what this rank holds to what was saved; return how many steps had been trained."""
        saved = read_saved(folder)
        load_layers(folder, saved, engine.layers, engine.optimizers, layout_of(self._model))
        scale = _loss_scale(engine)
        if scale is not None and scale.dynamic and saved.loss_scale is not None:
            scale.value, scale.num_good = saved.loss_scale, saved.num_good
        return saved.step

    def _owners(self) -> list[int]:
        """Return the rank of each layer; the first where all hold all."""
        if not follows_rows(self._job.config):
            return [0] * sum(self._job.layers_per_stage)
        ranks = zip(self._job.schedule.stage_ranks, self._job.layers_per_stage, strict=True)
        return [rank for rank, count in ranks for _ in range(count)]

    def transfer_times(self, transport: Transport) -> tuple[list[float], list[float]]:
        """Return for each of this rank's stages the one-way seconds of its input, and those of an almost empty tensor.

        0 where the input comes from this rank. Half of a round trip, median, one pair of ranks at a time while the
        others wait. The whole group calls this.
        """
        owner, rank = self._job.schedule.stage_ranks, self._job.rank
        times = dict.fromkeys(self._job.schedule.stages_of_rank(rank), (0.0, 0.0))
        for stage in range(1, len(owner)):
            there, here = owner[stage - 1], owner[stage]
            if there == here:
                continue
            dist.barrier()
            if rank in (there, here):
                [largest, *_] = sorted(self._bundles[stage - 1, stage][0].tensors, key=lambda spec: -spec.num_bytes)
                sizes = (largest, EMPTY_TENSOR)
                whole, empty = (one_way_time(transport, rank, here, there, spec) for spec in sizes)
                if rank == here:
                    times[stage] = (whole, empty)
        return [whole for whole, _ in times.values()], [empty for _, empty in times.values()]

    def _agree_on_bundles(self, stages: Mapping[int, Stage], sizes: Sequence[int]) -> Bundles:
        """Learn what passes around this rank's stages: whoever owns a stage works out what leaves it and tells.

        The whole group calls this, for micro-batches of the same `sizes`.
        """
        distinct = sorted(set(sizes))
        place = [distinct.index(size) for size in sizes]
        self._num_agreed += 1  # alike on all ranks; other devices and eval mode ask for the same sizes again
        name = f"bundles {self._num_agreed}"
        schedule, names = self._job.schedule, skips_between(layout_of(self._model), self._job.layers_per_stage)
        bundles: dict[tuple[int, int], list[Bundle]] = {}
        for number, stage in sorted(stages.items()):
            edges = [(source, number) for source in schedule.sources_of(number) or [-1]]
            arriving = [self._told(name, edge) if number else self._arriving_first(distinct) for edge in edges]
            leaving = [stage.output_specs(of_size) for of_size in zip(*arriving, strict=True)]
            bundles |= dict(zip(edges, arriving, strict=True))
            for target in schedule.targets_of(number) or [number + 1]:
                edge = (number, target)
                bundles[edge] = [whole.part(target == number + 1, names.get(edge, ())) for whole in leaving]
                self._store.set(f"{name} {edge}", _bundles_to_text(bundles[edge]))
        return {edge: [of_size[i] for i in place] for edge, of_size in bundles.items()}

    def _told(self, name: str, edge: tuple[int, int]) -> list[Bundle]:
        return _bundles_from(self._store.get(f"{name} {edge}"))

    def _arriving_first(self, sizes: Sequence[int]) -> list[Bundle]:
        """Return what the mini-batch gives the first stage, for micro-batches of these sizes."""
        inputs = self.mini_batch(0).inputs
        return [
            Bundle(
                tuple(TensorSpec((size, *tensor.shape[1:]), tensor.dtype) for tensor in tensors_of(inputs)),
                is_tuple=isinstance(inputs, tuple),
            )
            for size in sizes
        ]

    def _transport(self, device: torch.device) -> Transport:
        """Return the way between ranks; other engines have their own, so theirs is the network's here."""
        job, config = self._job, self._job.config
        owners = job.schedule.stage_ranks if follows_rows(config) else ()
        joined = [*itertools.pairwise(range(len(owners))), *(job.schedule.skips if owners else ())]
        pairs = {(owners[source], owners[target]) for source, target in joined if owners[source] != owners[target]}
        edges = sorted(pairs | {(here, there) for there, here in pairs})
        if config.engine != "pipebench":
            config = dataclasses.replace(config, transport="network")
        return transport_between(edges, self._room(edges), config, job.rank, device, self._store)

    def _room(self, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Room]:
        """Return what one step sends over each edge of this rank; at least one tensor each way, to time transfers."""
        sent: dict[tuple[int, int], list[int]] = {edge: [] for edge in edges if self._job.rank in edge}
        for transfer in self._job.schedule.transfers():
            edge = (transfer.source_rank, transfer.target_rank)
            if edge in sent:
                specs = specs_between(transfer.producer, transfer.consumer, self._bundles)
                sent[edge] += [spec.num_bytes for spec in specs]
        largest = {frozenset(edge): max([*sent[edge], *sent[edge[::-1]], 1]) for edge in sent}
        return {edge: Room(max(1, len(sizes)), largest[frozenset(edge)]) for edge, sizes in sent.items()}

    def _update_rules(self, stages: Mapping[int, Stage], device: torch.device) -> UpdateRules:
        config, layout, carrier = self._job.config, layout_of(self._model), carrier_of(self._job.config, device)
        return update_rules(config, layout, self._owners(), self._job.rank, layers_of(stages), carrier)


class Steps:
    """Runs training steps that all ranks begin at the same agreed moment; `row` are the actions of a step's spans.

    `step` counts all of training, from `first_step`; `after` is called with it after each step, outside of its time.
    """

    def __init__(
        self,
        engine: Engine,
        mini_batch: Callable[[int], MiniBatch],
        device: torch.device,
        phases: Phases,
        first_step: int = 0,
        after: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.step = first_step
        self.losses: list[float] = []
        self.updates: list[UpdateRecord | None] = []
        self.row = Row(())
        self._engine = engine
        self._mini_batch = mini_batch
        self._device = device
        self._phases = phases
        self._after = after
        self._margin_s = 0.002 * (1 + dist.get_world_size())

    def until_steady(self, most: int) -> tuple[list[float], bool]:
        """Warm up until two windows of step medians agree; return the step times and whether they did."""
        step_s: list[float] = []
        while len(step_s) < most:
            slowest, _, _ = self._run_one()
            step_s.append(slowest)
            self._phases.step_done(len(step_s), most, slowest)
            if is_steady(step_s):
                return step_s, True
        return step_s, False

    def timed(self, count: int) -> tuple[list[float], list[list[tuple[float, float, float]]]]:
        """Return this rank's own time and spans of each step."""
        own_s, spans = [], []
        for done in range(1, count + 1):
            slowest, own, own_spans = self._run_one()
            own_s.append(own)
            if own_spans:
                spans.append(own_spans)
            self._phases.step_done(done, count, slowest)
        return own_s, spans

    def _run_one(self) -> tuple[float, float, list[tuple[float, float, float]]]:
        """Run a step; return the slowest rank's seconds, this rank's, and this rank's spans."""
        batch = self._mini_batch(self.step).to(str(self._device))
        began = self._agreed_start()
        outcome = self._engine.train(self.step, batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        own = time.perf_counter() - began
        slowest, loss = _together(own, outcome.loss)
        if outcome.loss is not None and not math.isfinite(outcome.loss):
            raise LossError(f"rank {dist.get_rank()}: the loss of step {self.step + 1} is {outcome.loss}")
        self.losses.append(loss)
        self.updates.append(outcome.update)
        self.step += 1
        spans = outcome.spans()
        if not self.row:
            self.row = Row(span.action for span in spans)
        since_began = [(span.start_s - began, span.end_s - began, span.delay_s) for span in spans]
        self._after(self.step)
        return slowest, own, since_began

    def _agreed_start(self) -> float:
        """Return a moment soon after every rank is ready; the rank that begins the step waits for it.

        A barrier would release the ranks milliseconds apart where they share cores; perf_counter is one clock
        for the whole host. The other ranks go ahead and wait for their first tensor, as they do in training.
        """
        start = _largest(time.perf_counter()) + self._margin_s
        if dist.get_rank() == 0:
            time.sleep(max(0.0, start - time.perf_counter()))
        return start


def is_steady(step_s: list[float]) -> bool:
    """Tell whether the medians of the last two windows of steps differ by less than 2 %."""
    if len(step_s) < 2 * STEADY_WINDOW:
        return False
    before = statistics.median(step_s[-2 * STEADY_WINDOW : -STEADY_WINDOW])
    after = statistics.median(step_s[-STEADY_WINDOW:])
    return abs(after - before) < STEADY_FRACTION * before


def _together(own_s: float, loss: float | None) -> tuple[float, float]:
    """Return the slowest rank's seconds and the sum of all ranks' parts of the loss, the same on every rank."""
    mine = [0.0] * dist.get_world_size()
    mine[dist.get_rank()] = own_s
    told = torch.tensor([*mine, loss or 0.0], dtype=torch.float64)
    dist.all_reduce(told)
    return float(told[:-1].max()), float(told[-1])


def _largest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _whole_model_fits(job: RankJob, device: torch.device) -> bool:
    """Tell whether rank 0's GPU can hold weights, gradients and some activations of all layers; on all ranks."""
    if device.type == "cpu":
        return True
    free, _ = torch.cuda.mem_get_info()
    misses = 1.0 if job.rank == 0 and 3 * job.model_bytes > free else 0.0
    return _largest(misses) == 0.0


def _loss_scale(engine: Engine) -> LossScale | None:
    assert isinstance(engine, Pipeline | SingleProcess), "abilities let no other engine come here"
    return engine.update.loss_scale


def _parameters(engine: Engine) -> list[nn.Parameter]:
    """Return what the engine's layers hold, each once, be it tied to several of them."""
    return list(nn.ModuleList(engine.layers.values()).parameters())


@contextlib.contextmanager
def garbage_frozen() -> Iterator[None]:
    """Keep Python's collector out of timed steps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _bundles_to_text(bundles: Sequence[Bundle]) -> str:
    def told(specs: Sequence[TensorSpec]) -> list[Any]:
        return [[spec.shape, str(spec.dtype).removeprefix("torch."), spec.requires_grad] for spec in specs]

    return json.dumps([[told(each.value), each.is_tuple, each.names, told(each.kept)] for each in bundles])


def _bundles_from(text: bytes) -> list[Bundle]:
    def read(specs: list[Any]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in specs)

    return [
        Bundle(read(value), is_tuple, tuple(names), read(kept)) for value, is_tuple, names, kept in json.loads(text)
    ]


@contextlib.contextmanager
def _kept_buffers(engine: Engine) -> Iterator[None]:
    """Put back what a step that only adds gradients up does to buffers, such as running statistics."""
    buffers = [buffer for layer in engine.layers.values() for buffer in layer.buffers()]
    before = [buffer.clone() for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
