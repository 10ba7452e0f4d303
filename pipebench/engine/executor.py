"""Run one rank's row of a schedule on real tensors.

What an action waits for comes from `Schedule.dependencies` alone; before the first step it is compiled into
a plan, so that nothing is looked up between receiving a tensor and computing on it. The executor knows
neither models nor processes: stages compute, a transport carries.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipebench.engine.backward import Root, run_whole
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.stage import Stage, TensorSpec
from pipebench.engine.stopwatch import Stopwatch, TellSpans
from pipebench.engine.transport import Transport
from pipebench.engine.update import Update
from pipebench.engine.whereabouts import Whereabouts
from pipebench.errors import StageError
from pipebench.record import UpdateRecord
from pipebench.schedule.action import Action, Op, Schedule, Transfer
from pipebench.schedule.memory import peak_in_flight

RECEIVES_AHEAD = 4
"""Most receives posted per source beyond the one needed next where memory is tight: enough that a sender never
waits for a receiver that is merely busy, few enough to stay small beside the activations. Half of them is the mark
at which more are posted: each post wakes the sender's side, and several at once wake it once."""


_Post = tuple[Transfer, int, TensorSpec]
"""What `Transport.post` takes."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """An action with everything about it that the schedule fixes.

    A tag numbers a transfer alike on both its ranks; None where the tensor stays on this rank. `posts` are the
    receives to post before the action, and `settled` the tags this rank has sent that are known to have arrived once
    the tensor of `receive_tag` has. `code` is the action as one number.
    """

    action: Action
    code: int
    source: Action | None
    recomputed: bool
    receive_tag: int | None
    posts: tuple[_Post, ...]
    settled: tuple[int, ...]
    send: Transfer | None
    send_tag: int | None


@dataclass(slots=True)
class _InFlight:
    """What a stage holds of one micro-batch between its forward and its backward."""

    input: Tensor
    root: Root = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step on one rank: what tells its spans, the mini-batch's loss on the last stage's rank, and the update.

    `update` is None where the step only accumulated, and where the engine cannot tell.
    """

    spans: TellSpans
    loss: float | None
    update: UpdateRecord | None = None


class Executor:
    """One rank of a pipeline.

    `stages` hold this rank's stages by number; `boundary_specs[s]` is the tensor between stages
    s-1 and s for each micro-batch, wanted for both sides of this rank's stages. `update` is
    None where the rows have no `O`. `whereabouts` is told of every action, for whoever asks why a rank hangs.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        boundary_specs: Mapping[int, Sequence[TensorSpec]],
        update: Update | None,
        transport: Transport,
        stopwatch: Stopwatch,
        whereabouts: Whereabouts,
    ) -> None:
        self._rank = rank
        self._last_stage = schedule.num_stages - 1
        self._num_micro_batches = schedule.num_micro_batches
        self._stages = stages
        self._update = update
        self._transport = transport
        self._stopwatch = stopwatch
        self._whereabouts = whereabouts
        self._posted_at_first, self._plan = _plan(schedule, rank, boundary_specs)
        self._actions = [planned.action for planned in self._plan]
        self._run: dict[Op, Callable[[_Planned, Tensor | None], Tensor | None]] = {
            Op.FORWARD: self._forward,
            Op.RECOMPUTE: self._recompute,
            Op.BACKWARD: self._backward,
            Op.INPUT_GRADIENT: self._input_gradient,
            Op.WEIGHT_GRADIENT: self._weight_gradient,
            Op.OPTIMIZER: self._optimizer_step,
        }

    def run_step(
        self, step: int, inputs: Tensor | None, targets: Tensor | None, num_samples: int, loss_factor: float
    ) -> StepOutcome:
        """Run the row once on a mini-batch.

        `inputs` are needed where stage 0 lives and `targets` where the last stage lives, on the device.
        Gradients add up in `.grad`, those of the mini-batch's mean loss times `loss_factor`. Raise
        StageError, which names rank and action, for whatever goes wrong.
        """
        sizes = micro_batch_sizes(num_samples, self._num_micro_batches)
        self._step = step
        self._inputs = inputs.split(sizes) if inputs is not None else ()
        self._targets = targets.split(sizes) if targets is not None else ()
        self._weights: Sequence[Tensor] = ()
        if targets is not None:  # on the device at once: a copy in each backward would make the host wait for a GPU
            self._weights = torch.tensor([size / num_samples for size in sizes], device=targets.device).unbind()
            self._gradients_of_losses = [weight * loss_factor for weight in self._weights]
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._put_off: dict[tuple[int, int], Any] = {}
        self._handed_over: dict[Action, Tensor] = {}
        self._losses: list[Tensor] = [torch.empty(())] * self._num_micro_batches
        for post in self._posted_at_first:
            self._transport.post(*post)
        for planned in self._plan:
            try:
                self._execute(planned)
            except Exception as error:
                told = str(error) or type(error).__name__
                raise StageError(f"rank {self._rank} failed at {planned.action}: {told}") from error
        self._transport.finish()
        self._whereabouts.between()
        spans = self._stopwatch.step_done(self._rank, self._actions)
        return StepOutcome(spans, self._mean_loss())

    def _mean_loss(self) -> float | None:
        """Return the mini-batch's loss on the last stage's rank; the host asks for it once a step."""
        if self._last_stage not in self._stages:
            return None
        return float((torch.stack(self._losses) * torch.stack(list(self._weights))).sum())

    def _execute(self, planned: _Planned) -> None:
        received = None
        if planned.receive_tag is not None:
            self._whereabouts.waits(planned.code)
            for post in planned.posts:
                self._transport.post(*post)
            received = self._transport.receive(planned.receive_tag)
            for tag in planned.settled:
                self._transport.settle(tag)
        elif planned.source is not None:
            received = self._handed_over.pop(planned.source)
        if self._update is not None and planned.action.op == Op.OPTIMIZER:
            self._whereabouts.waits(planned.code)
            self._update.prepare()
        self._whereabouts.runs(planned.code)
        self._stopwatch.start()
        result = self._run[planned.action.op](planned, received)
        self._stopwatch.stop()
        if planned.send is not None and planned.send_tag is not None:
            assert result is not None
            self._transport.send(planned.send, planned.send_tag, result)
        elif result is not None:
            self._handed_over[planned.action] = result

    def _forward(self, planned: _Planned, received: Tensor | None) -> Tensor | None:
        stage, m = planned.action.stage, planned.action.micro_batch
        if received is None:
            held = _InFlight(self._inputs[m])
        else:
            held = _InFlight(received.requires_grad_(received.is_floating_point()))
        self._in_flight[stage, m] = held
        if planned.recomputed:
            with torch.no_grad():
                output = self._compute(held, stage, m)
        else:
            output = self._compute(held, stage, m)
            held.root = self._stages[stage].backward.root_of(output)
        if stage == self._last_stage:
            self._losses[m] = output.detach()
            return None
        return output.detach()

    def _recompute(self, planned: _Planned, received: Tensor | None) -> None:
        stage, m = planned.action.stage, planned.action.micro_batch
        held = self._in_flight[stage, m]
        held.root = self._stages[stage].backward.root_of(self._compute(held, stage, m))

    def _compute(self, held: _InFlight, stage: int, m: int) -> Tensor:
        """Return the stage's output, or the micro-batch's mean loss on the last stage."""
        output = self._stages[stage].forward(held.input, self._step, m)
        if stage == self._last_stage:
            return self._stages[stage].loss_of(output, self._targets[m])
        return output

    def _backward(self, planned: _Planned, received: Tensor | None) -> Tensor | None:
        stage = planned.action.stage
        held, gradient = self._let_go(planned.action, received)
        if gradient is not None:
            run_whole(held.root, gradient)
        return self._gradient_of_input(stage, held)

    def _input_gradient(self, planned: _Planned, received: Tensor | None) -> Tensor | None:
        stage, m = planned.action.stage, planned.action.micro_batch
        held, gradient = self._let_go(planned.action, received)
        if gradient is not None:
            self._put_off[stage, m] = self._stages[stage].backward.of_input(held.root, held.input, gradient)
        return self._gradient_of_input(stage, held)

    def _weight_gradient(self, planned: _Planned, received: Tensor | None) -> None:
        stage, m = planned.action.stage, planned.action.micro_batch
        put_off = self._put_off.pop((stage, m), None)
        if put_off is not None:
            self._stages[stage].backward.of_weights(put_off)

    def _let_go(self, action: Action, received: Tensor | None) -> tuple[_InFlight, Tensor | None]:
        """Return what is held of the micro-batch, from now on in flight no more, and the gradient of its output."""
        held = self._in_flight.pop((action.stage, action.micro_batch))
        if held.root is None:
            return held, None
        return held, self._gradients_of_losses[action.micro_batch] if action.stage == self._last_stage else received

    def _gradient_of_input(self, stage: int, held: _InFlight) -> Tensor | None:
        if stage == 0:
            return None
        gradient, held.input.grad = held.input.grad, None
        return torch.zeros_like(held.input) if gradient is None else gradient

    def _optimizer_step(self, planned: _Planned, received: Tensor | None) -> None:
        assert self._update is not None
        self._update.step(planned.action.stage)


def _plan(
    schedule: Schedule, rank: int, boundary_specs: Mapping[int, Sequence[TensorSpec]]
) -> tuple[Sequence[_Post], list[_Planned]]:
    """Return what is posted before the first action, and the actions."""
    position = {action: index for row in schedule.rows for index, action in enumerate(row)}
    received = {}
    sent = {}
    for tag, transfer in enumerate(schedule.transfers()):
        if transfer.target_rank == rank:
            received[transfer.consumer] = (tag, transfer)
        if transfer.source_rank == rank:
            sent[transfer.producer] = (tag, transfer)
    posted_at_first, posts = _posts(schedule, rank, boundary_specs)
    unsettled: list[tuple[int, Transfer]] = []
    plan = []
    for action, code in zip(schedule.rows[rank], schedule.rows[rank].codes.tolist(), strict=True):
        receive_tag, settled = None, []
        if action in received:
            receive_tag, arrival = received[action]
            # The sender made this tensor after it had used what we sent it for earlier actions of its row.
            settled = [
                (tag, transfer)
                for tag, transfer in unsettled
                if transfer.target_rank == arrival.source_rank
                and position[transfer.consumer] < position[arrival.producer]
            ]
            unsettled = [entry for entry in unsettled if entry not in settled]
        send_tag, send = sent.get(action, (None, None))
        if send is not None and send_tag is not None:
            unsettled.append((send_tag, send))
        plan.append(
            _Planned(
                action=action,
                code=code,
                source=_tensor_source(schedule, action),
                recomputed=schedule.runs(Op.RECOMPUTE, action.stage, action.micro_batch),
                receive_tag=receive_tag,
                posts=tuple(posts.get(action, ())),
                settled=tuple(tag for tag, _ in settled),
                send=send,
                send_tag=send_tag,
            )
        )
    return posted_at_first, plan


def _posts(
    schedule: Schedule, rank: int, boundary_specs: Mapping[int, Sequence[TensorSpec]]
) -> tuple[list[_Post], dict[Action, list[_Post]]]:
    """Return the receives to post before the first action and before each one that receives.

    They come in the order in which a source sends, which NCCL needs. More than a few are posted ahead only into memory
    that the rank will need, or has needed, at its peak anyway: inputs while it holds fewer micro-batches than then,
    gradients in the place of micro-batches that are done.
    """
    transfers = list(schedule.transfers())
    incoming = _incoming(schedule, rank)
    place_of = {transfers[tag].consumer: (source, i) for source, tags in incoming.items() for i, tag in enumerate(tags)}
    num_posted = dict.fromkeys(incoming, 0)
    most_in_flight = peak_in_flight(schedule)[rank]
    in_flight = num_done = 0

    def ahead(source: int, num_needed: int) -> Iterator[_Post]:
        tags = incoming[source]
        if num_posted[source] >= min(num_needed + RECEIVES_AHEAD // 2, len(tags)):
            return
        room = most_in_flight - in_flight
        for place in range(num_posted[source], len(tags)):
            transfer = transfers[tags[place]]
            spare = room if transfer.consumer.op == Op.FORWARD else min(room, num_done)
            if place >= num_needed + max(RECEIVES_AHEAD, spare):
                break
            # What arrives is the consumer's input, or the gradient of the producer's input: the same spec.
            stage = max(transfer.producer.stage, transfer.consumer.stage)
            yield transfer, tags[place], boundary_specs[stage][transfer.producer.micro_batch]
            num_posted[source] += 1

    at_first = [post for source in incoming for post in ahead(source, 0)]
    before: dict[Action, list[_Post]] = {}
    for action in schedule.rows[rank]:
        if action in place_of:
            source, place = place_of[action]
            before[action] = list(ahead(source, place + 1))
        in_flight += action.op == Op.FORWARD
        if action.op in (Op.BACKWARD, Op.INPUT_GRADIENT):
            in_flight, num_done = in_flight - 1, num_done + 1
    return at_first, before


def _tensor_source(schedule: Schedule, action: Action) -> Action | None:
    """Return the dependency on another stage, whose result is this action's tensor."""
    others = [other for other in schedule.dependencies(action) if other.stage != action.stage]
    return others[0] if others else None


def _incoming(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """Return for each source rank the tags it sends here, in the order of its row."""
    position = {action: index for row in schedule.rows for index, action in enumerate(row)}
    incoming: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for tag, transfer in enumerate(schedule.transfers()):
        if transfer.target_rank == rank:
            incoming[transfer.source_rank].append((position[transfer.producer], tag))
    return {source: [tag for _, tag in sorted(tags)] for source, tags in incoming.items()}
