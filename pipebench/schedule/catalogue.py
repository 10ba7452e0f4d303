"""All schedules by the name that users write: the built-in ones, and any CSV file."""

from pathlib import Path

import pipebench.schedule.v_shaped  # noqa: F401  (registers its schedules)
from pipebench.errors import ConfigError, ScheduleError
from pipebench.schedule.action import Schedule
from pipebench.schedule.builders import SCHEDULES
from pipebench.schedule.text import load_csv

ZB_AUTO = "zb_auto"
"""The name of the order that `schedule/search.py` finds; it needs costs and a memory limit beside the sizes."""


def is_file(name: str) -> bool:
    return name.endswith(".csv")


def takes_chunks(name: str, chunks: int) -> bool:
    """Tell whether a built-in schedule is defined for so many stages a rank."""
    recipe = SCHEDULES[name]
    return recipe.least_chunks <= chunks and (recipe.most_chunks is None or chunks <= recipe.most_chunks)


def build(name: str, num_ranks: int, num_micro_batches: int, chunks: int | None = None) -> Schedule:
    """Build the named schedule, or read it where the name ends in .csv; `chunks` None is the schedule's usual number.

    Raise ConfigError for an unknown name or a number of chunks it is not defined for, ScheduleError for impossible
    sizes and for a file that is no schedule of this size.
    """
    if is_file(name):
        return _read(Path(name), num_ranks, num_micro_batches)
    if name not in SCHEDULES:
        raise ConfigError(f"schedule={name!r}: expected one of {', '.join(SCHEDULES)}, {ZB_AUTO}, or a .csv file")
    if num_ranks < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"schedule {name}: {num_ranks} stages, {num_micro_batches} micro-batches: expected at least 1 of each"
        )
    recipe = SCHEDULES[name]
    chunks = recipe.usual_chunks if chunks is None else chunks
    if not takes_chunks(name, chunks):
        only = recipe.least_chunks == recipe.most_chunks
        wanted = f"{recipe.least_chunks}" if only else f"at least {recipe.least_chunks}"
        raise ConfigError(f"chunks={chunks}: expected {wanted} with schedule={name}")
    return Schedule(name, recipe.build(num_ranks, num_micro_batches, chunks))


def _read(path: Path, num_ranks: int, num_micro_batches: int) -> Schedule:
    schedule = load_csv(path)
    if (schedule.num_ranks, schedule.num_micro_batches) != (num_ranks, num_micro_batches):
        raise ScheduleError(
            f"schedule {path}: has {schedule.num_ranks} ranks and {schedule.num_micro_batches} micro-batches: "
            f"expected stages={num_ranks} and micro={num_micro_batches}"
        )
    return schedule
