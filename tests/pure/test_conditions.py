"""What disturbs a point, told from files of /proc and /sys made by hand."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipebench.conditions import Reading, flags_between, merged, read_conditions

CPU = "sys/devices/system/cpu/cpu"
QUIET = {
    "proc/loadavg": "5.00 5.00 5.00 1/200 4242\n",
    "proc/meminfo": "MemAvailable: 1024 kB\nSwapTotal: 4096 kB\nSwapFree: 4096 kB\n",
    **{f"{CPU}{core}/thermal_throttle/core_throttle_count": "7\n" for core in range(2)},
    **{f"{CPU}{core}/cpufreq/{name}_max_freq": "3000000\n" for core in range(2) for name in ("scaling", "cpuinfo")},
}


def machine_with(root: Path, **changes: str) -> Path:
    for name, text in {**QUIET, **changes}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def flags_of(before: Path, after: Path, wanted_cores: int = 2) -> list[str]:
    return flags_between(read_conditions("cpu", before), read_conditions("cpu", after), wanted_cores, num_cores=2)


def test_a_quiet_machine_raises_no_flag_whatever_its_average_load_was(tmp_path: Path) -> None:
    quiet = machine_with(tmp_path)
    assert flags_of(quiet, quiet) == []


def test_a_machine_that_tells_nothing_raises_no_flag(tmp_path: Path) -> None:
    assert read_conditions("cpu", tmp_path) == Reading()


@pytest.mark.parametrize(
    ("name", "text", "flag"),
    [
        ("proc/loadavg", "0 0 0 4/200 4242", "other load: 3 busy threads of others, 0 of 2 cores left for them"),
        ("proc/meminfo", "SwapTotal: 4096 kB\nSwapFree: 2048 kB", "swap in use: 2 MiB"),
        (f"{CPU}1/thermal_throttle/core_throttle_count", "10", "throttled: 3 times by heat"),
        (f"{CPU}0/cpufreq/scaling_max_freq", "1500000", "slow clock: capped at 50% of the highest frequency"),
    ],
)
def test_what_disturbs_a_point_is_a_flag(name: str, text: str, flag: str, tmp_path: Path) -> None:
    quiet, disturbed = machine_with(tmp_path / "quiet"), machine_with(tmp_path / "disturbed", **{name: text})
    assert flags_of(quiet, disturbed) == [flag]


def test_heat_from_before_the_point_is_not_held_against_it(tmp_path: Path) -> None:
    hot = machine_with(tmp_path, **{f"{CPU}1/thermal_throttle/core_throttle_count": "10"})
    assert flags_of(hot, hot) == []


def test_others_may_have_the_cores_that_a_point_leaves(tmp_path: Path) -> None:
    one_other = machine_with(tmp_path, **{"proc/loadavg": "0 0 0 2/200 4242"})
    assert flags_of(one_other, one_other, wanted_cores=1) == []
    assert len(flags_of(one_other, one_other, wanted_cores=2)) == 1


@pytest.mark.parametrize("text", ["", "nonsense", "0 0 0 x/y 1"])
def test_a_file_that_makes_no_sense_raises_no_flag(text: str, tmp_path: Path) -> None:
    odd = machine_with(tmp_path, **dict.fromkeys(QUIET, text))
    assert flags_of(odd, odd) == []


def test_a_kind_of_flag_stands_once_however_often_it_was_seen() -> None:
    first, more = ["swap in use: 2 MiB"], ["swap in use: 3 MiB", "throttled: 1 times by heat"]
    assert merged(first, more) == ["swap in use: 2 MiB", "throttled: 1 times by heat"]


def fake_pynvml(processes: list[int], error: bool) -> Any:
    """Return what stands for nvidia-ml-py: GPUs with so many processes each, or a driver that says nothing."""
    module: Any = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})

    def init() -> None:
        if error:
            raise module.NVMLError("driver not loaded")

    module.nvmlInit, module.nvmlShutdown = init, lambda: None
    module.nvmlDeviceGetCount = lambda: len(processes)
    module.nvmlDeviceGetHandleByIndex = lambda number: number
    module.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [object()] * processes[gpu]
    return module


@pytest.mark.parametrize(("error", "found"), [(False, 2), (True, 0)])
def test_processes_of_others_on_a_gpu_are_counted_where_the_driver_tells(
    error: bool, found: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml([0, 2], error))
    reading = read_conditions("cuda", tmp_path)
    assert reading.gpu_processes == found
    told = ["shared GPU: 2 processes of others"] if found else []
    assert flags_between(reading, Reading(), 2, 2) == told


def test_a_machine_without_nvidia_ml_py_raises_no_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_conditions("cuda", tmp_path).gpu_processes == 0
