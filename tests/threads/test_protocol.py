"""What the executor asks of its transport, and that the transport of these tests would notice."""

import pytest
import torch
from in_process import InProcessTransport, World, run_ranks
from plain import MODELS, build, mini_batch
from ranks import CPU, Point, unseen

from pipebench.engine.executor import RECEIVES_AHEAD, Executor
from pipebench.engine.stage import TensorSpec
from pipebench.engine.stopwatch import HostStopwatch
from pipebench.schedule.action import Action, Transfer
from pipebench.schedule.builders import Recompute, only_forwards
from pipebench.schedule.memory import peak_in_flight

TWO = TensorSpec((2,), torch.float32)


def transfer() -> Transfer:
    return Transfer(Action.parse("0F0"), Action.parse("1F0"), 0, 1)


class Counting(InProcessTransport):
    """Remembers how many receives were posted and not yet received, for each source, and how much was unsettled."""

    most_unsettled = 0
    most_posted: dict[int, int]
    posted: dict[int, int]

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.most_posted, self.posted, self._source = {}, {}, dict[int, int]()

    def post(self, transfer: Transfer, tag: int, spec: TensorSpec) -> None:
        super().post(transfer, tag, spec)
        source = self._source[tag] = transfer.source_rank
        self.posted[source] = self.posted.get(source, 0) + 1
        self.most_posted[source] = max(self.most_posted.get(source, 0), self.posted[source])

    def receive(self, tag: int) -> torch.Tensor:
        self.posted[self._source[tag]] -= 1
        return super().receive(tag)

    def send(self, transfer: Transfer, tag: int, tensor: torch.Tensor) -> None:
        super().send(transfer, tag, tensor)
        self.most_unsettled = max(self.most_unsettled, len(self._unsettled))


def transports_after_a_step(point: Point, evaluates: bool = False) -> list[Counting]:
    layers, loss = build(point.model)
    stages = point.stages(layers, loss)
    bundles = point.bundles(stages)
    batch = mini_batch(point.model, 0, point.num_samples)

    schedule = only_forwards(point.schedule, point.num_micro_batches) if evaluates else point.schedule

    def work(rank: int, transport: InProcessTransport) -> Counting:
        counting = Counting(transport.world, rank)
        stopwatch = HostStopwatch()
        around = {edge: bundles[edge] for edge in bundles if rank in edge}
        executor = Executor(schedule, rank, {rank: stages[rank]}, around, None, counting, stopwatch, unseen())
        executor.run_step(0, batch.inputs, batch.targets, len(batch.inputs), 1.0)
        stopwatch.close()
        return counting

    return run_ranks(point.num_stages, work)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS], ids=["never", "always"])
def test_no_more_receives_are_posted_than_memory_was_planned_for(name: str, recompute: Recompute) -> None:
    point = Point(MODELS["mlp"], name, recompute, num_stages=4, num_micro_batches=9)
    held = peak_in_flight(point.schedule)
    for rank, transport in enumerate(transports_after_a_step(point)):
        for source, most in transport.most_posted.items():
            assert most <= RECEIVES_AHEAD + 1 + (held[rank] if source < rank else 0)


def test_an_evaluation_that_holds_nothing_posts_only_a_few_receives_ahead() -> None:
    transports = transports_after_a_step(Point(MODELS["mlp"], num_stages=3, num_micro_batches=11), evaluates=True)
    assert [max(transport.most_posted.values(), default=0) for transport in transports] == [0, 5, 5]


@pytest.mark.parametrize(("name", "most"), [("1f1b", 4), ("naive", 2)])
def test_sent_tensors_are_let_go_during_the_step(name: str, most: int) -> None:
    """They live as long as activations do: as many as stages follow, not as many as there are micro-batches."""
    transports = transports_after_a_step(Point(MODELS["mlp"], name, num_stages=3, num_micro_batches=11))
    assert all(transport.most_unsettled <= 2 * most for transport in transports)


def sent(world: World) -> tuple[InProcessTransport, InProcessTransport, torch.Tensor]:
    sender, receiver, tensor = InProcessTransport(world, 0), InProcessTransport(world, 1), torch.ones(2)
    sender.send(transfer(), 7, tensor)
    return sender, receiver, tensor


def test_settling_what_has_not_been_received_is_noticed() -> None:
    sender, _, _ = sent(World())
    with pytest.raises(AssertionError, match="tag 7 settled before it was received"):
        sender.settle(7)


def test_changing_a_tensor_that_is_being_sent_is_noticed() -> None:
    sender, receiver, tensor = sent(World())
    receiver.post(transfer(), 7, TWO)
    receiver.receive(7)
    tensor.add_(1)
    with pytest.raises(AssertionError, match="tag 7 was changed while it was being sent"):
        sender.finish()


def test_posting_twice_and_leaving_a_receive_open_are_noticed() -> None:
    _, receiver, _ = sent(World())
    receiver.post(transfer(), 7, TWO)
    with pytest.raises(AssertionError, match="tag 7 posted twice"):
        receiver.post(transfer(), 7, TWO)
    with pytest.raises(AssertionError, match=r"rank 1 never received \[7\]"):
        receiver.finish()


@pytest.mark.parametrize("spec", [TensorSpec((3,), torch.float32), TensorSpec((2,), torch.bfloat16)])
def test_a_wrong_shape_or_dtype_is_noticed(spec: TensorSpec) -> None:
    _, receiver, _ = sent(World())
    receiver.post(transfer(), 7, spec)
    with pytest.raises(AssertionError, match=r"tag 7: .* came, .* was posted"):
        receiver.receive(7)


def test_a_spec_knows_its_bytes_and_makes_an_empty_tensor() -> None:
    spec = TensorSpec((2, 3), torch.bfloat16)
    assert spec.num_bytes == 12
    assert (spec.empty(CPU).shape, spec.empty(CPU).dtype) == ((2, 3), torch.bfloat16)
