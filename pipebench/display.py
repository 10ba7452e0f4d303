"""What a sweep shows while it runs: a live line on a terminal, plain lines elsewhere.

Nothing refreshes by itself: a timer in this process would steal time from the steps being measured. Workers
wait while a line is drawn (`launch.run_group`), so drawing falls between steps.
"""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipebench.config import RunConfig, value_at
from pipebench.harness.launch import Progress
from pipebench.harness.sweep import Plan, Standing, groups_done
from pipebench.record import RunResult, step_times
from pipebench.rows import COMPARABLE

_BAR_WIDTH = 24
_AGAIN = "again, for the noise floor"


class Display:
    """Counts fresh groups of workers (for points, references and the second look) and shows the current one."""

    def __init__(self, plan: Plan, console: Console, num_done: int = 0) -> None:
        """`num_done` groups were measured before, by the sweep that this one resumes."""
        self._console = console
        self._swept = plan.swept
        self._references = list(plan.references.values())
        twice = [] if plan.again is None else [plan.points[plan.again]]
        self._total = sum(config.repeats for config in (*plan.all.values(), *twice))
        self._started = self._num_done = num_done
        self._began = time.monotonic()
        self._current = ""
        self._live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the live line, on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    def point_started(self, config: RunConfig, round_number: int) -> None:
        self._start(self._name(config), config.repeats, round_number)

    def again_started(self, config: RunConfig, round_number: int) -> None:
        self._start(f"{self._name(config)} {_AGAIN}", config.repeats, round_number)

    def progress(self, progress: Progress) -> None:
        self._draw(progress)

    def point_done(self, result: RunResult) -> None:
        line = self._outcome(self._name(result.config), result)
        if result.status not in COMPARABLE:
            line.stylize("red")
        self._console.print(line, soft_wrap=True)

    def again_done(self, result: RunResult) -> None:
        """A second look that fails costs no point anything, so it is a warning."""
        line = self._outcome(f"{self._name(result.config)} {_AGAIN}", result)
        if result.status not in COMPARABLE:
            line.stylize("yellow")
        self._console.print(line, soft_wrap=True)

    def _start(self, name: str, repeats: int, round_number: int) -> None:
        self._started += 1
        self._current = name + (f", round {round_number + 1} of {repeats}" if repeats > 1 else "")
        self._draw(Progress("starting"))

    def _outcome(self, name: str, result: RunResult) -> Text:
        times = [time for repeat in result.repeats for time in step_times(repeat.ranks)]
        step = f"  step {sorted(times)[(len(times) - 1) // 2] * 1e3:.1f} ms" if times else ""
        message = f"  {result.message}" if result.message else ""
        count = f"[{self._started:>{len(str(self._total))}}/{self._total}]"
        return Text(f"{count} {name:<34} {result.status}{step}{message}")

    def note(self, text: str) -> None:
        """Print a line of warning."""
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def _name(self, config: RunConfig) -> str:
        settings = {key: value_at(config, key) for key in ("stages", "micro", *self._swept)}
        parts = [f"{key}={value}" for key, value in settings.items() if value is not None]
        return "one device, for the speed-up" if config in self._references else " ".join(parts)

    def _draw(self, progress: Progress) -> None:
        if self._live is None:
            return
        filled = _BAR_WIDTH * (self._started - 1) // self._total
        bar = "━" * filled + "─" * (_BAR_WIDTH - filled)
        steps = f" {progress.done}/{progress.total}" if progress.total else ""
        step = f"  last step {progress.step_s * 1e3:.0f} ms" if progress.step_s is not None else ""
        self._live.update(
            Text(f"{bar} {self._started}/{self._total}  {self._current}: {progress.phase}{steps}{step}{self._left()}"),
            refresh=True,
        )

    def _left(self) -> str:
        """Estimate the time left from the mean time of the groups that are done."""
        done = self._started - 1 - self._num_done
        if done < 1:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self._total - self._started + 1)
        return f"  about {seconds:.0f} s left" if seconds < 120 else f"  about {seconds / 60:.0f} min left"


def make_display(plan: Plan, before: Standing | None = None) -> Display:
    num_done = groups_done(plan, before) if before else 0
    return Display(plan, Console(file=sys.stdout, highlight=False), num_done)
