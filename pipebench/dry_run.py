"""`dry_run=true`: what a sweep would run, how large and how long by the model, and what it would skip; nothing written.

Real points need their layers' bytes and seconds. These come from `profile=` where that is given, else a worker
measures each layer once as the sweep itself would do; nothing is trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pipebench import machine
from pipebench.config import RunConfig, ranks_per_device, value_at
from pipebench.costs import Profile, for_samples, load_profile
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.errors import PointError, ScheduleError
from pipebench.harness.forecast import Forecast, forecast, why_too_large
from pipebench.harness.prepare import prepare
from pipebench.harness.sweep import Known, Plan, profile_of_point, warnings_before, why_not_weights
from pipebench.peers.abilities import why_not, why_not_model

if TYPE_CHECKING:
    from rich.table import Table

_LEFT_OUT = ("skipped", "will fail")
"""How the note of a point begins that will have no result."""

ProfileOf = Callable[[RunConfig], Profile]


@dataclass(frozen=True, slots=True)
class _Line:
    """One point: its forecast, None where there can be none; `note` says what will not run and why."""

    config: RunConfig
    forecast: Forecast | None
    note: str

    @property
    def at_most_s(self) -> float:
        """Return the seconds of all its steps, warm-up at its longest, ranks that share a device one after another."""
        if self.forecast is None or self.note.startswith(_LEFT_OUT) or self.config.engine == "simulate":
            return 0.0
        num_steps = self.config.repeats * (self.config.warmup + self.config.steps)
        return num_steps * self.forecast.step_s * ranks_per_device(self.config, machine.this_machine())


def preview(plan: Plan, profile: str | None) -> None:
    """Print the grid, references included; raise ConfigError where `profile` cannot be used."""
    from rich.console import Console

    known = Known()
    profile_of: ProfileOf = _measured_by(known) if profile is None else partial(_read, profile)
    why_not_profiled = (lambda config: "") if profile else partial(_why_not_profiled, known)
    lines = {key: _line(config, profile_of, why_not_profiled) for key, config in plan.all.items()}
    points = [lines[key] for key in plan.points]
    table = _table(plan, points)
    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)
    print(*(f"warning: {warning}" for warning in warnings_before(plan)), _in_words(plan, lines), sep="\n")


def _measured_by(known: Known) -> ProfileOf:
    """Measure with seconds, be the partition by them or not."""
    return lambda config: profile_of_point(replace(config, partition="time"), known, lambda progress: None)


def _why_not_profiled(known: Known, config: RunConfig) -> str:
    """Return why nothing is measured of a point's layers: it may be too large even for that."""
    return "" if config.engine == "simulate" else why_not_weights(config, known, lambda progress: None)


def _read(path: str | None, config: RunConfig) -> Profile:
    samples = micro_batch_sizes(config.batch, config.micro)[0]
    return for_samples(load_profile(replace(config, profile=path)), samples)


def _line(config: RunConfig, profile_of: ProfileOf, why_not_profiled: Callable[[RunConfig], str]) -> _Line:
    try:
        unable = why_not(config, machine.this_machine()) or why_not_profiled(config)
        if unable:
            return _Line(config, None, f"skipped: {unable}")
        profile = _read(config.profile, config) if config.engine == "simulate" else profile_of(config)
        unable = why_not_model(config, profile.layers)
        if unable:
            return _Line(config, None, f"skipped: {unable}")
        foretold = forecast(config, profile, prepare(config, profile))
    except (PointError, ScheduleError) as error:
        return _Line(config, None, f"will fail: {error}")
    reason = why_too_large(config, foretold.memory, machine.capacity())
    if reason:
        return _Line(config, foretold, f"{'runs, forced' if config.force else 'skipped'}: {reason}")
    return _Line(config, foretold, "")


def _table(plan: Plan, lines: list[_Line]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(("stages", "micro", *plan.swept)))
    table = Table(box=None, padding=(0, 2), pad_edge=False, collapse_padding=True, header_style="bold")
    for name in names:
        table.add_column(Text(name), no_wrap=True)
    for header in ("layers\nof stages", "MiB by rank,\nat least", "step ms,\npredicted", "steps s,\nat most", ""):
        table.add_column(header, no_wrap=True)
    for line in lines:
        cells = [str(value_at(line.config, name)) for name in names] + [*_numbers(line), line.note]
        table.add_row(*map(Text, cells), style="yellow" if line.note else None)
    return table


def _numbers(line: _Line) -> list[str]:
    if line.forecast is None:
        return ["", "", "", ""]
    memory = " ".join(f"{rank.peak_bytes / 2**20:.4g}" for rank in line.forecast.memory)
    layers = " ".join(map(str, line.forecast.layers_per_stage))
    return [
        layers,
        memory,
        f"{line.forecast.step_s * 1e3:.4g}",
        f"{line.at_most_s:.3g}" if line.at_most_s else "",
    ]


def _in_words(plan: Plan, lines: dict[str, _Line]) -> str:
    twice = lines[plan.again].at_most_s if plan.again else 0.0
    seconds = sum(line.at_most_s for line in lines.values()) + twice
    left_out = [line for line in lines.values() if line.note.startswith(_LEFT_OUT)]
    counts = (
        f"{len(plan.points)} points and {len(plan.references)} references, {len(left_out)} of them without a result"
    )
    return (
        f"dry run, nothing written: {counts}; about {seconds:.0f} s of steps at most, besides starting processes "
        "and checking gradients"
    )
