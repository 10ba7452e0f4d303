"""Tensors through memory that two ranks share: whole, in any order, and no wait that nobody ends."""

import multiprocessing as mp
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore, HashStore

from pipebench.engine.shared_memory import _IDLE_BYTES, Room, SharedMemoryTransport
from pipebench.engine.stage import TensorSpec
from pipebench.schedule.action import Action, Op, Transfer

CPU = torch.device("cpu")
ANY = Action(Op.FORWARD, 0, 0)
THERE, BACK = Transfer(ANY, ANY, 0, 1), Transfer(ANY, ANY, 1, 0)
SPEC = TensorSpec((3, 5), torch.float32)
PATIENCE_S = 20.0

Pair = tuple[SharedMemoryTransport, SharedMemoryTransport]


def connect(num_tensors: int = 4, tensor_bytes: int = SPEC.num_bytes) -> Pair:
    store = HashStore()
    room = dict.fromkeys([(0, 1), (1, 0)], Room(num_tensors, tensor_bytes))
    with ThreadPoolExecutor(2) as ranks:
        ends = ranks.map(lambda rank: SharedMemoryTransport(CPU, room, rank, store), range(2))
        return tuple(ends)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = connect()
    yield ends
    for end in ends:
        end.close()


def numbered(number: int, spec: TensorSpec = SPEC) -> Tensor:
    return torch.full(spec.shape, number, dtype=spec.dtype)


def test_tensors_arrive_whole_whatever_the_order_they_are_wanted_in(pair: Pair) -> None:
    first, second = pair
    for tag in range(4):
        second.post(THERE, tag, SPEC)
        first.send(THERE, tag, numbered(tag))
    for tag in (2, 0, 3, 1):
        assert torch.equal(second.receive(tag), numbered(tag))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_type_of_number_keeps_its_bits(dtype: torch.dtype) -> None:
    spec = TensorSpec((7,), dtype)
    first, second = connect(tensor_bytes=7 * 8)
    tensor = torch.arange(7).to(dtype)
    second.post(THERE, 0, spec)
    first.send(THERE, 0, tensor)
    received = second.receive(0)
    assert (received.dtype, received.tolist()) == (dtype, tensor.tolist())
    first.close()
    second.close()


def test_what_is_sent_may_be_changed_at_once_and_need_not_be_contiguous(pair: Pair) -> None:
    first, second = pair
    tensor = torch.arange(15.0).view(5, 3).t()
    second.post(THERE, 0, SPEC)
    first.send(THERE, 0, tensor)
    expected = tensor.clone()
    tensor.zero_()
    assert torch.equal(second.receive(0), expected)


def test_a_receiver_waits_for_what_is_sent_later(pair: Pair) -> None:
    first, second = pair
    second.post(THERE, 0, SPEC)
    with ThreadPoolExecutor(1) as ranks:
        receiving = ranks.submit(second.receive, 0)
        assert not receiving.done()
        first.send(THERE, 0, numbered(1))
        assert torch.equal(receiving.result(PATIENCE_S), numbered(1))


def test_a_sender_a_step_ahead_waits_for_room_and_mixes_nothing_up(pair: Pair) -> None:
    """Both send two steps' worth of tensors under the same tags; the room of one step is all there is."""
    first, second = pair

    def two_steps(end: SharedMemoryTransport, out: Transfer, back: Transfer) -> list[float]:
        received = []
        for step in range(2):
            for tag in range(4):
                end.send(out, tag, numbered(10 * step + tag))
            for tag in range(4):
                end.post(back, tag, SPEC)
                received.append(float(end.receive(tag).mean()))
        return received

    with ThreadPoolExecutor(2) as ranks:
        both = [ranks.submit(two_steps, first, THERE, BACK), ranks.submit(two_steps, second, BACK, THERE)]
        assert [each.result(PATIENCE_S) for each in both] == [[0, 1, 2, 3, 10, 11, 12, 13]] * 2


def test_slots_are_used_again_and_the_most_taken_at_once_are_counted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    monkeypatch.setattr(first._outboxes[1], "_num_idle", 0)
    for tag in range(4):
        second.post(THERE, tag, SPEC)
        first.send(THERE, tag, numbered(tag))
        second.receive(tag)
    assert first.peak_bytes == 64, "one tensor of 60 bytes at a time, in a slot of 64"
    for tag in range(3):
        second.post(THERE, tag, SPEC)
        first.send(THERE, tag, numbered(tag))
    assert (first.peak_bytes, second.peak_bytes) == (3 * 64, 0)


def test_emptied_slots_of_small_tensors_are_taken_back_several_at_once() -> None:
    num_idle = _IDLE_BYTES // 64
    first, second = connect(4 * num_idle)
    for tag in range(4 * num_idle):
        second.post(THERE, tag, SPEC)
        first.send(THERE, tag, numbered(tag))
        second.receive(tag)
    assert first.peak_bytes == _IDLE_BYTES


def test_slots_of_large_tensors_are_taken_back_at_once() -> None:
    large = TensorSpec((_IDLE_BYTES // 4 + 1,), torch.float32)
    first, second = connect(4, large.num_bytes)
    for tag in range(4):
        second.post(THERE, tag, large)
        first.send(THERE, tag, torch.ones(large.shape))
        second.receive(tag)
    assert first.peak_bytes == _IDLE_BYTES + 64


@pytest.mark.parametrize("num_tensors", [1, 9000])
def test_a_step_s_tensors_fit_however_many(num_tensors: int) -> None:
    """More than a pipe's 64 KiB of announcements, and nobody reads before all are sent."""
    first, second = connect(num_tensors)
    for tag in range(num_tensors):
        first.send(THERE, tag, numbered(tag))
    second.post(THERE, num_tensors - 1, SPEC)
    assert torch.equal(second.receive(num_tensors - 1), numbered(num_tensors - 1))
    first.close()
    second.close()


def _send_once_and_die(path: Path) -> None:
    room = dict.fromkeys([(0, 1), (1, 0)], Room(2, SPEC.num_bytes))
    transport = SharedMemoryTransport(CPU, room, 0, FileStore(str(path), 2))
    transport.send(THERE, 0, numbered(7))


def test_a_peer_that_is_gone_ends_every_wait(tmp_path: Path) -> None:
    path = tmp_path / "store"
    peer = mp.get_context("spawn").Process(target=_send_once_and_die, args=(path,))
    peer.start()
    room = dict.fromkeys([(0, 1), (1, 0)], Room(2, SPEC.num_bytes))
    end = SharedMemoryTransport(CPU, room, 1, FileStore(str(path), 2))
    peer.join(PATIENCE_S)
    end.post(THERE, 0, SPEC)
    assert torch.equal(end.receive(0), numbered(7)), "what it sent before is still there"
    end.post(THERE, 1, SPEC)
    with pytest.raises(ConnectionError):
        end.receive(1)
    with pytest.raises(ConnectionError):
        end.send(BACK, 0, numbered(0))
    end.close()


def test_no_thread_is_started() -> None:
    """A second thread delivers late where the one that computes has the core."""
    before = set(threading.enumerate())
    first, second = connect()
    first.send(THERE, 0, numbered(1))
    second.post(THERE, 0, SPEC)
    second.receive(0)
    assert set(threading.enumerate()) <= before
    first.close()
    second.close()
