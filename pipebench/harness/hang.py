"""Why a silent group is silent: which rank holds the others up, and what each of them waits for."""

import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from pipebench.engine.whereabouts import Place, in_words, steps_in_words
from pipebench.harness.failures import GroupError, last_lines, output_path
from pipebench.record import Failure
from pipebench.schedule.action import Schedule


def hang_of(
    limit: str, processes: Sequence[BaseProcess], places: Sequence[Place], schedule: Schedule | None, folder: Path
) -> GroupError:
    """Return the error of a group that passed `limit`: how far it came, then what its ranks do, the culprit first.

    The culprit is a rank that is stopped, else the one that has been at its action for longest and waits for nobody.
    """
    now_s = time.perf_counter()
    stopped = [_is_stopped(process) for process in processes]
    words = [
        f"rank {rank} {'is stopped and ' if is_stopped else ''}{in_words(place, schedule, now_s)}"
        for rank, (place, is_stopped) in enumerate(zip(places, stopped, strict=True))
    ]
    culprit = _culprit(places, stopped)
    order = sorted(range(len(words)), key=lambda rank: rank != culprit)
    action = None if culprit is None else places[culprit].action
    failure = Failure(
        rank=culprit,
        stage=None if action is None else action.stage,
        action="" if action is None else str(action),
        exception=limit,
        output=[] if culprit is None else last_lines(output_path(folder, culprit)),
        others=[words[rank] for rank in order if rank != culprit],
    )
    reached = steps_in_words(places)
    headline = f"{limit}, {reached}" if reached else limit
    return GroupError("timeout", f"{headline}: {'; '.join(words[rank] for rank in order)}", failure)


def _culprit(places: Sequence[Place], stopped: Sequence[bool]) -> int | None:
    if any(stopped):
        return stopped.index(True)
    busy = [rank for rank, place in enumerate(places) if place.runs]
    return min(busy, key=lambda rank: places[rank].since_s, default=None)


def _is_stopped(process: BaseProcess) -> bool:
    """Tell whether a signal has stopped the process; False where the system does not say."""
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")
