"""A long sweep leaves nothing behind in its own process: no file, thread or process more, and no memory.

Fifteen points in every test run; `make soak` runs two hundred.
"""

import os
from pathlib import Path

import psutil
import pytest

from pipebench.cli import main
from pipebench.display import Display
from pipebench.record import RunResult

NUM_POINTS = int(os.environ.get("PIPEBENCH_SOAK_POINTS", "15"))
SETTLED = 5
"""Points after which everything that is made once has been made: the fork server, imports, caches."""

SMALL = ("model=mlp", "model.layers=2", "model.width=8", "batch=4", "steps=2", "warmup=1", "partition=uniform")


def test_a_long_sweep_grows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    us = psutil.Process()
    seen: list[tuple[int, int, int, int]] = []
    point_done = Display.point_done

    def look(self: Display, result: RunResult) -> None:
        point_done(self, result)
        children = [each for each in us.children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
        seen.append((us.num_fds(), us.num_threads(), len(children), us.memory_info().rss))

    monkeypatch.setattr(Display, "point_done", look)
    seeds = ",".join(map(str, range(NUM_POINTS)))
    arguments = ["-m", f"seed={seeds}", "stages=2", "micro=2", *SMALL, "trackers=[]", "noise_floor=false"]
    assert main([*arguments, f"results_dir={tmp_path}"]) == 0

    assert len(seen) >= NUM_POINTS
    files, threads, processes, memory = zip(*seen[SETTLED:], strict=True)
    assert max(files) <= files[0], files
    assert max(threads) <= threads[0], threads
    assert max(processes) <= processes[0], processes
    assert max(memory) - memory[0] < 20 * 2**20, memory
