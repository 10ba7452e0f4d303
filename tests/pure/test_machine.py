"""What a machine is said to have, with a driver made by hand."""

import ctypes
from typing import Any

import pytest

from pipebench import machine


class Driver:
    """Answers as libcuda does: status 0, results through pointers."""

    def __init__(self, names: list[bytes | None]) -> None:
        self.names = names

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        found = self.names[device.value]
        if found is None:
            return 1
        name.value = found[: length - 1]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver([b"GPU A", b"GPU A", None])
    monkeypatch.setattr(machine, "_version_of", lambda package: "2.9.0+cu128")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


def test_gpus_have_the_names_that_their_driver_gives(driver: Driver) -> None:
    assert machine.gpu_names() == ["GPU A", "GPU A", "a GPU without a name"]
    assert machine.this_machine().num_gpus == 3
    described = machine.describe()
    assert (described["gpu"], described["gpus"]) == ("GPU A / a GPU without a name", 3)


def test_a_torch_without_cuda_uses_no_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version_of", lambda package: "2.9.0+cpu")
    assert machine.gpu_names() == []
    assert (machine.describe()["gpu"], machine.describe()["gpus"]) == ("", 0)
