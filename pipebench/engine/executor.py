"""Run one rank's row of a schedule on real tensors.

What an action waits for comes from `Schedule.dependencies` alone; before the first step it is compiled into
a plan, so that nothing is looked up between receiving a tensor and computing on it. The executor knows
neither models nor processes: stages compute, a transport carries.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipebench.engine.backward import Root, run_whole
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.stage import Bundle, Bundles, Stage, StageOutput, TensorSpec, packed, unpacked
from pipebench.engine.stopwatch import Stopwatch, TellSpans
from pipebench.engine.transport import Transport
from pipebench.engine.update import Update
from pipebench.engine.whereabouts import Whereabouts
from pipebench.errors import StageError
from pipebench.record import UpdateRecord
from pipebench.schedule.action import Action, Op, Schedule, Transfer
from pipebench.schedule.memory import peak_in_flight
from pipebench.values import Value, split, tensors_of

RECEIVES_AHEAD = 4
"""Most receives posted per source beyond the one needed next where memory is tight: enough that a sender never
waits for a receiver that is merely busy, few enough to stay small beside the activations. Half of them is the mark
at which more are posted: each post wakes the sender's side, and several at once wake it once."""


TENSORS_PER_TRANSFER = 64
"""Most tensors that pass between two stages for one micro-batch: tags are numbers that both sides work out alone."""


_Post = tuple[Transfer, int, TensorSpec]
"""What `Transport.post` takes."""


@dataclass(frozen=True, slots=True)
class _Message:
    """Tensors that pass from one action to another, numbered alike on both their ranks; no tags within a rank."""

    producer: Action
    consumer: Action
    specs: tuple[TensorSpec, ...]
    transfer: Transfer | None
    tags: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Planned:
    """An action with everything about it that the schedule fixes.

    `arriving` and `leaving` are the stage's bundles of the micro-batch, with which of their tensors take a gradient;
    `received` and `sent` are the messages of this action, in the same order. `posts` are the receives to post before
    it, `waits` tells whether something comes from another rank, and `settled` are the tags this rank has sent that are
    known to have arrived once it has come. `code` is the action as one number.
    """

    action: Action
    code: int
    recomputed: bool
    arriving: tuple[Bundle, ...]
    leaving: tuple[Bundle, ...]
    inputs_learn: tuple[bool, ...]
    outputs_learn: tuple[bool, ...]
    received: tuple[_Message, ...]
    waits: bool
    posts: tuple[_Post, ...]
    settled: tuple[int, ...]
    sent: tuple[_Message, ...]


@dataclass(slots=True)
class _InFlight:
    """What a stage holds of one micro-batch between its forward and its backward."""

    inputs: list[Tensor]
    roots: list[Root]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step on one rank: what tells its spans, and this rank's part of the mini-batch's loss and metrics.

    The loss is that of the last stage and what layers add to it; None on a rank that has no part in it. `update` is
    None where the step only accumulated, and where the engine cannot tell. Metrics are known to the last stage's rank,
    and of an evaluation only.
    """

    spans: TellSpans
    loss: float | None
    update: UpdateRecord | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Executor:
    """One rank of a pipeline.

    `stages` are this rank's stages by number; `bundles` say what passes between each of them and
    its sources and targets. `update` is None where the rows have no `O`. `whereabouts` is told of every
    action, for whoever asks why a rank hangs. Where the schedule has forwards alone, nothing of them is kept.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        bundles: Bundles,
        update: Update | None,
        transport: Transport,
        stopwatch: Stopwatch,
        whereabouts: Whereabouts,
    ) -> None:
        self._rank = rank
        self._last_stage = schedule.num_stages - 1
        self._num_micro_batches = schedule.num_micro_batches
        self._goes_back = _goes_back(schedule)
        self._stages = stages
        self._adds_to_loss = any(stage.has_auxiliary_loss for stage in stages.values())
        self._update = update
        self._transport = transport
        self._stopwatch = stopwatch
        self._whereabouts = whereabouts
        self._posted_at_first, self._plan = _plan(schedule, rank, bundles)
        self._actions = [planned.action for planned in self._plan]
        self._run: dict[Op, Callable[[_Planned, list[Tensor]], Sequence[Tensor]]] = {
            Op.FORWARD: self._forward,
            Op.RECOMPUTE: self._recompute,
            Op.BACKWARD: self._backward,
            Op.INPUT_GRADIENT: self._input_gradient,
            Op.WEIGHT_GRADIENT: self._weight_gradient,
            Op.OPTIMIZER: self._optimizer_step,
        }

    def run_step(
        self, step: int, inputs: Value | None, targets: Value | None, num_samples: int, loss_factor: float
    ) -> StepOutcome:
        """Run the row once on a mini-batch.

        `inputs` are needed where stage 0 lives and `targets` where the last stage lives, on the device.
        Gradients add up in `.grad`, those of the mini-batch's mean loss times `loss_factor`. Raise
        StageError, which names rank and action, for whatever goes wrong.
        """
        sizes = micro_batch_sizes(num_samples, self._num_micro_batches)
        return self.run_pass(step, inputs, targets, sizes, num_samples, self.count(targets), loss_factor)

    def count(self, targets: Value | None) -> int:
        """Return how many things the loss would be the mean of; 0 where the last stage lives elsewhere."""
        last = self._stages.get(self._last_stage)
        return 0 if last is None or last.loss is None else int(last.loss.count(targets))

    def run_pass(
        self,
        step: int,
        inputs: Value | None,
        targets: Value | None,
        sizes: Sequence[int],
        num_samples: int,
        num_counted: int,
        loss_factor: float,
    ) -> StepOutcome:
        """Run the row once on micro-batches of these sizes, a part of or all of a mini-batch.

        That one has `num_samples`, and its loss is the mean of `num_counted` things (see `count`).
        """
        self._step = step
        self._inputs = split(inputs, sizes) if inputs is not None else ()
        self._targets = split(targets, sizes) if targets is not None else ()
        self._weigh(sizes, num_samples, num_counted, loss_factor)
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._put_off: dict[tuple[int, int], Any] = {}
        self._handed_over: dict[tuple[Action, Action], Sequence[Tensor]] = {}
        self._losses: list[Tensor] = []
        self._metrics = defaultdict[str, list[Tensor]](list)
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
        self._inputs = self._targets = ()
        spans = self._stopwatch.step_done(self._rank, self._actions)
        loss = _summed(self._losses) if self._losses else None  # the host asks for it once a step
        metrics = {name: _summed(values) for name, values in self._metrics.items()}
        return StepOutcome(spans, loss, metrics=metrics)

    def _weigh(self, sizes: Sequence[int], num_samples: int, num_counted: int, loss_factor: float) -> None:
        """Set what each micro-batch's loss counts: its share of what the loss is a mean of, or of the samples.

        With the gradients that backwards start from: on the device at once, for a copy in each backward would make the
        host wait for a GPU.
        """
        self._counts: Sequence[int] = ()
        last = self._stages.get(self._last_stage)
        if last is not None and last.loss is not None:
            self._counts = [self.count(target) for target in self._targets]
            if num_counted == 0:
                raise StageError(
                    f"rank {self._rank}: the loss is a mean over nothing: no target of the whole batch counts"
                )
            shares = [count / num_counted for count in self._counts]
            self._weights, self._loss_gradients = self._on_device(shares, loss_factor)
        if self._adds_to_loss:
            shares = [size / num_samples for size in sizes]
            self._shares, self._auxiliary_gradients = self._on_device(shares, loss_factor)

    def _on_device(self, shares: Sequence[float], factor: float) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each share, and each times the factor."""
        plain = torch.tensor(shares, device=self._transport.device)
        return plain.unbind(), (plain * factor).unbind()

    def _execute(self, planned: _Planned) -> None:
        received: list[Tensor] = []
        if planned.waits:
            self._whereabouts.waits(planned.code)
            for post in planned.posts:
                self._transport.post(*post)
        for message in planned.received:
            if message.transfer is None:
                received += self._handed_over.pop((message.producer, message.consumer))
            else:
                received += [self._transport.receive(tag) for tag in message.tags]
        for tag in planned.settled:
            self._transport.settle(tag)
        if self._update is not None and planned.action.op == Op.OPTIMIZER:
            self._whereabouts.waits(planned.code)
            self._update.prepare()
        self._whereabouts.runs(planned.code)
        self._stopwatch.start()
        result = self._run[planned.action.op](planned, received)
        self._stopwatch.stop()
        begin = 0
        for message in planned.sent:
            end = begin + len(message.specs)
            tensors, begin = result[begin:end], end
            if message.transfer is None:
                self._handed_over[message.producer, message.consumer] = tensors
            else:
                for tag, tensor in zip(message.tags, tensors, strict=True):
                    self._transport.send(message.transfer, tag, tensor)

    def _forward(self, planned: _Planned, received: list[Tensor]) -> Sequence[Tensor]:
        stage, m = planned.action.stage, planned.action.micro_batch
        if stage == 0:
            held = _InFlight(list(tensors_of(self._inputs[m])), [])
        else:
            for tensor, learns in zip(received, planned.inputs_learn, strict=True):
                tensor.requires_grad_(learns)
            held = _InFlight(received, [])
        if self._goes_back:
            self._in_flight[stage, m] = held
        if planned.recomputed or not self._goes_back:
            with torch.no_grad():
                output = self._compute(planned, held, again=False)
        else:
            output = self._compute(planned, held, again=False)
            self._hold(planned, held, output)
        if stage == self._last_stage:
            assert isinstance(output.value, Tensor)
            if self._counts[m]:  # a product, for the loss itself may lie in memory as large as what it was made of
                self._losses.append(output.value.detach() * self._weights[m])
        if output.auxiliary is not None:
            self._losses.append(output.auxiliary.detach() * self._shares[m])
        return [] if stage == self._last_stage else [tensor.detach() for tensor in packed(planned.leaving, output)]

    def _recompute(self, planned: _Planned, received: list[Tensor]) -> Sequence[Tensor]:
        held = self._in_flight[planned.action.stage, planned.action.micro_batch]
        self._hold(planned, held, self._compute(planned, held, again=True))
        return []

    def _compute(self, planned: _Planned, held: _InFlight, again: bool) -> StageOutput:
        """Return the stage's output, whose value on the last stage is the micro-batch's mean loss."""
        number, m = planned.action.stage, planned.action.micro_batch
        stage = self._stages[number]
        value, kept = unpacked(planned.arriving, held.inputs)
        output = stage.run(value, kept, self._step, m, again)
        if number < self._last_stage:
            return output
        target = self._targets[m]
        if not self._goes_back and self._counts[m]:
            for name, value in stage.metrics_of(output.value, target).items():
                self._metrics[name].append(value * self._weights[m])
        return StageOutput(stage.loss_of(output.value, target), {}, output.auxiliary)

    def _hold(self, planned: _Planned, held: _InFlight, output: StageOutput) -> None:
        """Keep where the backward will start; not at the mean of nothing, which is no number."""
        stage, m = planned.action.stage, planned.action.micro_batch
        root_of = self._stages[stage].backward.root_of
        if stage == self._last_stage:
            assert isinstance(output.value, Tensor)
            held.roots = [root_of(output.value) if self._counts[m] else None]
        else:
            tensors = packed(planned.leaving, output)
            held.roots = [root_of(x) for x, learns in zip(tensors, planned.outputs_learn, strict=True) if learns]
        if output.auxiliary is not None:
            held.roots.append(root_of(output.auxiliary))

    def _backward(self, planned: _Planned, received: list[Tensor]) -> Sequence[Tensor]:
        held, gradients = self._let_go(planned.action, received)
        run_whole(held.roots, gradients)
        return _gradients_of(held)

    def _input_gradient(self, planned: _Planned, received: list[Tensor]) -> Sequence[Tensor]:
        stage, m = planned.action.stage, planned.action.micro_batch
        held, gradients = self._let_go(planned.action, received)
        self._put_off[stage, m] = self._stages[stage].backward.of_input(held.roots, held.inputs, gradients)
        return _gradients_of(held)

    def _weight_gradient(self, planned: _Planned, received: list[Tensor]) -> Sequence[Tensor]:
        stage, m = planned.action.stage, planned.action.micro_batch
        self._stages[stage].backward.of_weights(self._put_off.pop((stage, m)))
        return []

    def _let_go(self, action: Action, received: list[Tensor]) -> tuple[_InFlight, list[Tensor]]:
        """Return what is held of the micro-batch, from now on in flight no more, and a gradient for each root."""
        stage, m = action.stage, action.micro_batch
        held = self._in_flight.pop((stage, m))
        gradients = [self._loss_gradients[m]] if stage == self._last_stage else received
        if len(held.roots) > len(gradients):  # the last root is that of an auxiliary loss
            gradients = [*gradients, self._auxiliary_gradients[m]]
        return held, gradients

    def _optimizer_step(self, planned: _Planned, received: list[Tensor]) -> Sequence[Tensor]:
        assert self._update is not None
        self._update.step(planned.action.stage)
        return []


def _summed(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).sum())


def _goes_back(schedule: Schedule) -> bool:
    """Tell whether forwards have a backward; those of an evaluation have none."""
    return Op.BACKWARD in schedule.place or Op.INPUT_GRADIENT in schedule.place


def _gradients_of(held: _InFlight) -> list[Tensor]:
    """Return the gradients of a stage's inputs, zeros for those that nothing depended on."""
    gradients = []
    for tensor in held.inputs:
        if tensor.requires_grad:
            gradients.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
            tensor.grad = None
    return gradients


def _plan(schedule: Schedule, rank: int, bundles: Bundles) -> tuple[Sequence[_Post], list[_Planned]]:
    """Return what is posted before the first action, and the actions."""
    messages = _messages(schedule, rank, bundles)
    position = {action: index for row in schedule.rows for index, action in enumerate(row)}
    received, sent = defaultdict[Action, list[_Message]](list), defaultdict[Action, list[_Message]](list)
    for message in messages:
        if schedule.rank_of(message.consumer) == rank:
            received[message.consumer].append(message)
        if schedule.rank_of(message.producer) == rank:
            sent[message.producer].append(message)
    for messages_of_action in sent.values():
        messages_of_action.sort(key=lambda message: _turn(schedule, message))
    posted_at_first, posts = _posts(schedule, rank, messages)
    unsettled: list[_Message] = []
    plan = []
    for action, code in zip(schedule.rows[rank], schedule.rows[rank].codes.tolist(), strict=True):
        # Each sender made its tensor after it had used what we sent it for earlier actions of its row.
        arrived = {each.transfer.source_rank: each for each in received[action] if each.transfer is not None}
        settled, waiting = list[int](), list[_Message]()
        for message in unsettled:
            arrival = arrived.get(schedule.rank_of(message.consumer))
            if arrival is not None and position[message.consumer] < position[arrival.producer]:
                settled += message.tags
            else:
                waiting.append(message)
        unsettled = waiting + [message for message in sent[action] if message.transfer is not None]
        arriving = tuple(bundles[edge][action.micro_batch] for edge in _edges_into(schedule, action))
        leaving = tuple(bundles[edge][action.micro_batch] for edge in _edges_out_of(schedule, action))
        plan.append(
            _Planned(
                action=action,
                code=code,
                recomputed=schedule.runs(Op.RECOMPUTE, action.stage, action.micro_batch),
                arriving=arriving,
                leaving=leaving,
                inputs_learn=_learning(arriving),
                outputs_learn=_learning(leaving),
                received=tuple(received[action]),
                waits=bool(arrived),
                posts=tuple(posts.get(action, ())),
                settled=tuple(settled),
                sent=tuple(sent[action]),
            )
        )
    return posted_at_first, plan


def _learning(bundles: Sequence[Bundle]) -> tuple[bool, ...]:
    return tuple(spec.requires_grad for bundle in bundles for spec in bundle.tensors)


def _edges_into(schedule: Schedule, action: Action) -> list[tuple[int, int]]:
    if action.op not in (Op.FORWARD, Op.RECOMPUTE):
        return []
    return [(source, action.stage) for source in schedule.sources_of(action.stage) or [-1]]


def _edges_out_of(schedule: Schedule, action: Action) -> list[tuple[int, int]]:
    if action.op not in (Op.FORWARD, Op.RECOMPUTE):
        return []
    return [(action.stage, target) for target in schedule.targets_of(action.stage)]


def _messages(schedule: Schedule, rank: int, bundles: Bundles) -> list[_Message]:
    """Return what passes to and from this rank's actions, in the order in which the consumers stand in the rows.

    What one action receives stands in the order of its stage's bundles, as its tensors do. Where no tensor of a bundle
    takes a gradient, nothing comes back.
    """
    places = {(t.producer, t.consumer): (place, t) for place, t in enumerate(schedule.transfers())}
    messages = []
    for consumer in schedule:
        for producer in schedule.dependencies(consumer):
            if producer.stage == consumer.stage or rank not in (schedule.rank_of(producer), schedule.rank_of(consumer)):
                continue
            specs = specs_between(producer, consumer, bundles)
            if len(specs) > TENSORS_PER_TRANSFER:
                raise StageError(f"{producer} to {consumer}: {len(specs)} tensors, at most {TENSORS_PER_TRANSFER} can")
            place, transfer = places.get((producer, consumer), (0, None))
            tags = range(place * TENSORS_PER_TRANSFER, place * TENSORS_PER_TRANSFER + len(specs)) if transfer else ()
            if specs:
                messages.append(_Message(producer, consumer, specs, transfer, tuple(tags)))
    return messages


def specs_between(producer: Action, consumer: Action, bundles: Bundles) -> tuple[TensorSpec, ...]:
    """Return the tensors that an action hands to one of another stage: a bundle, or the gradients that come back."""
    if producer.stage < consumer.stage:
        return bundles[producer.stage, consumer.stage][producer.micro_batch].tensors
    return bundles[consumer.stage, producer.stage][producer.micro_batch].gradients


def _posts(
    schedule: Schedule, rank: int, messages: Sequence[_Message]
) -> tuple[list[_Post], dict[Action, list[_Post]]]:
    """Return the receives to post before the first action and before each one that receives.

    They come in the order in which a source sends, which NCCL needs. More than a few are posted ahead only into memory
    that the rank will need, or has needed, at its peak anyway: inputs while it holds fewer micro-batches than then,
    gradients in the place of micro-batches that are done.
    """
    incoming = _incoming(schedule, rank, messages)
    needed = defaultdict[Action, dict[int, int]](dict)
    for source, arriving in incoming.items():
        for place, message in enumerate(arriving):
            needed[message.consumer][source] = place + 1
    num_posted = dict.fromkeys(incoming, 0)
    most_in_flight = peak_in_flight(schedule)[rank] if _goes_back(schedule) else 0
    in_flight = num_done = 0

    def ahead(source: int, num_needed: int) -> Iterator[_Post]:
        arriving = incoming[source]
        if num_posted[source] >= min(num_needed + RECEIVES_AHEAD // 2, len(arriving)):
            return
        room = most_in_flight - in_flight
        for place in range(num_posted[source], len(arriving)):
            message = arriving[place]
            spare = room if message.consumer.op == Op.FORWARD else min(room, num_done)
            if place >= num_needed + max(RECEIVES_AHEAD, spare):
                break
            assert message.transfer is not None
            for tag, spec in zip(message.tags, message.specs, strict=True):
                yield message.transfer, tag, spec
            num_posted[source] += 1

    at_first = [post for source in incoming for post in ahead(source, 0)]
    before: dict[Action, list[_Post]] = {}
    for action in schedule.rows[rank]:
        if action in needed:
            before[action] = [post for source, num in needed[action].items() for post in ahead(source, num)]
        in_flight += action.op == Op.FORWARD
        if action.op in (Op.BACKWARD, Op.INPUT_GRADIENT):
            in_flight, num_done = in_flight - 1, num_done + 1
    return at_first, before


def _incoming(schedule: Schedule, rank: int, messages: Sequence[_Message]) -> dict[int, list[_Message]]:
    """Return for each source rank the messages it sends here, in the order in which it does."""
    position = {action: index for row in schedule.rows for index, action in enumerate(row)}
    incoming = defaultdict[int, list[_Message]](list)
    for message in messages:
        if message.transfer is not None and message.transfer.target_rank == rank:
            incoming[message.transfer.source_rank].append(message)
    # An action sends to its stage's targets, or sources, in turn; where two live on one rank, in that order.
    return {
        source: sorted(arriving, key=lambda message: (position[message.producer], _turn(schedule, message)))
        for source, arriving in incoming.items()
    }


def _turn(schedule: Schedule, message: _Message) -> int:
    """Return which of its producer's messages this is."""
    producer, consumer = message.producer.stage, message.consumer.stage
    others = schedule.targets_of(producer) if consumer > producer else schedule.sources_of(producer)
    return others.index(consumer)
