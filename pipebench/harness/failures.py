"""What went wrong in a group of workers: each rank's own account, and which of them is the cause.

When one rank fails, the others fail after it, and their errors may be heard first. A rank whose error came out of
the communication with a peer is never the cause while another rank has an error of its own or is dead.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pipebench.engine.whereabouts import Place
from pipebench.errors import LossError, PointError
from pipebench.record import Failure

OUTPUT_LINES = 20
"""Last lines of a rank's output that a failed point keeps."""

_OUTPUT_BYTES = 16_384
_OUT_OF_MEMORY_TEXTS = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
"""PyTorch has no type for it on the CPU: its RuntimeError says one of these."""

_COMMUNICATION = ("torch.distributed", "pipebench.engine.transport", "pipebench.engine.shared_memory")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's account. `when_s` is on the host's clock; `by_peer`: what it noticed was another rank's end."""

    when_s: float
    rank: int
    status: str
    message: str
    exception: str
    place: Place
    by_peer: bool


class GroupError(PointError):
    """A group failed: the status of its point, and the cause."""

    def __init__(self, status: str, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.status = status
        self.failure = failure


def failure_of(
    error: BaseException, rank: int, place: Place, when_s: float, full_folder: Path | None = None
) -> RankFailure:
    """Return this rank's account of an exception it raised; a temporary folder that is full then is named in it."""
    cause = original(error)
    text = " ".join(str(error).split())
    name = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    if not isinstance(error, PointError):
        text = f"rank {rank} failed while {place.phase or 'starting'}: {name}"
    if full_folder is not None:
        text += f"; no room is left in {full_folder} (TMPDIR)"
    return RankFailure(when_s, rank, _status(cause), text, name, place, _is_by_peer(cause))


def death_of(rank: int, exit_code: int | None, out_of_memory: bool, place: Place, when_s: float) -> RankFailure:
    """Return the account of a rank that ended without one."""
    where = f"at {place.action}" if place.action else f"while {place.phase or 'starting'}"
    if exit_code is None or exit_code >= 0:
        text = f"exit code {exit_code}"
        return RankFailure(when_s, rank, "crashed", f"rank {rank} died {where}, {text}", text, place, False)
    text = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    if out_of_memory and exit_code == -signal.SIGKILL:
        message = f"rank {rank} was killed {where}: the kernel had no memory left for it"
        return RankFailure(when_s, rank, "oom", message, f"{text} by the kernel, out of memory", place, False)
    return RankFailure(when_s, rank, "crashed", f"rank {rank} was killed {where} by {text}", text, place, False)


def first_cause(failures: Sequence[RankFailure], folder: Path) -> GroupError:
    """Return the error of the group; `folder` has the ranks' outputs."""
    ordered = sorted(failures, key=lambda failure: (failure.by_peer, failure.when_s))
    cause, *others = ordered
    action = cause.place.action
    failure = Failure(
        rank=cause.rank,
        stage=None if action is None else action.stage,
        action="" if action is None else str(action),
        exception=cause.exception,
        output=last_lines(output_path(folder, cause.rank)),
        others=[other.message for other in others],
    )
    return GroupError(cause.status, cause.message, failure)


def output_path(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}"


def last_lines(path: Path) -> list[str]:
    """Return what a rank printed last; nothing where it could not even make its file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _OUTPUT_BYTES))
        return file.read().decode(errors="replace").splitlines()[-OUTPUT_LINES:]


def num_oom_kills() -> int:
    """Return how many processes the kernel has killed for memory in this process's cgroup, 0 where it does not say."""
    try:
        [own] = [line.strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        events = (Path("/sys/fs/cgroup") / own.removeprefix("0::").lstrip("/") / "memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    except (OSError, ValueError, KeyError):
        return 0


def original(error: BaseException) -> BaseException:
    """Return what an error was raised from, and that from: the one that says most."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> str:
    if isinstance(error, LossError):
        return "nan"
    torch = sys.modules.get("torch")
    of_torch = () if torch is None else (torch.OutOfMemoryError,)
    if isinstance(error, (MemoryError, *of_torch)):
        return "oom"
    text = str(error).lower()
    said = isinstance(error, RuntimeError | OSError) and any(words in text for words in _OUT_OF_MEMORY_TEXTS)
    return "oom" if said else "error"


def _is_by_peer(error: BaseException) -> bool:
    """Tell whether the error came out of the communication with other ranks, by the code that raised it."""
    if _status(error) == "oom":
        return False
    innermost: TracebackType | None = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = "" if innermost is None else str(innermost.tb_frame.f_globals.get("__name__", ""))
    return module.startswith(_COMMUNICATION)
