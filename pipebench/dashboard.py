"""`python -m pipebench.dashboard`: a saved W&B workspace that shows the runs of sweeps, in five sections.

A project page without it has a panel for each series alone; here the lines of all K share one, beside bars of every
point. The lines over M are those of the sweeps' own runs, bars and scatters those of points: neither kind of run has
the other's names, so no panel needs a filter.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pipebench.compose import CONF_DIR, CONFIG_NAME
from pipebench.errors import ConfigError, first_line
from pipebench.ledger import PARTS
from pipebench.tracking.wandb_environment import wandb_environment
from pipebench.tracking.wandb_runs import MICRO_BATCHES, TRAINING_STEP, end_service, no_longer_than

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import BarPlot, LinePlot, MediaBrowser, ScatterPlot
    from wandb_workspaces.workspaces import Section, Workspace

NAME = "pipebench"
MOST_RUNS = 100
"""Runs a panel shows at most; W&B's own limit of 10 would hide most of a sweep."""

HOW_TO_SAVE = "not saved; with a key (wandb login): python -m pipebench.dashboard --save"


MOST_S = 45.0
"""Seconds for all that is asked of W&B: it waits up to half a minute for one answer of a server that is not there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Save the workspace and print its address, or print its specification; return the exit code, 1 on failure."""
    arguments = _parse(argv)
    try:
        with wandb_environment():
            import wandb_workspaces  # noqa: F401
    except ImportError:
        print("wandb-workspaces is missing: pip install 'pipebench[dashboard]'", file=sys.stderr)
        return 1
    with wandb_environment(), no_longer_than(MOST_S, "online"):
        try:
            return _save_or_show(arguments)
        finally:
            end_service()  # left to the interpreter's end, a service that goes on trying would hold it for minutes


def _save_or_show(arguments: argparse.Namespace) -> int:
    import wandb

    wandb.setup(wandb.Settings(silent=True, console="off"))  # silent also keeps it from asking for a key
    if arguments.save:
        try:
            print(_save(arguments.project, arguments.entity))
            return 0
        except wandb.errors.UsageError as error:
            print(f"W&B: {first_line(error)}", file=sys.stderr)
        except Exception as error:
            print(f"the workspace could not be saved: {first_line(error)}", file=sys.stderr)
            return 1
    _show(workspace(arguments.project, arguments.entity or ""))
    return 1 if arguments.save else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usual = OmegaConf.load(CONF_DIR / f"{CONFIG_NAME}.yaml").wandb
    parser = argparse.ArgumentParser(
        prog="python -m pipebench.dashboard",
        description="Print the specification of a W&B workspace for pipebench's runs, or save it.",
    )
    parser.add_argument("--project", default=usual.project, help=f"W&B project, {usual.project} if not given")
    parser.add_argument("--entity", default=usual.entity, help="W&B user or team, that of the key if not given")
    parser.add_argument("--save", action="store_true", help="save it at W&B; needs a key (wandb login)")
    return parser.parse_args(argv)


def _save(project: str, entity: str | None) -> str:
    """Save the workspace as a new view of the project, and return its address."""
    import wandb

    owner = entity or wandb.Api().default_entity
    if owner is None:
        raise ConfigError("the key has no default entity: expected --entity")
    view = workspace(project, owner)
    view.save()
    return str(view.url)


def _show(view: "Workspace") -> None:
    try:
        print(json.dumps(specification(view), indent=2))
        print(HOW_TO_SAVE, file=sys.stderr)
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def workspace(project: str, entity: str) -> "Workspace":
    """Return the workspace, unsaved."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[_throughput(), _bubble(), _memory(), _ledger(), _training()],
        settings=ws.WorkspaceSettings(max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(order=[expr.Ordering(expr.Metric("Name"), ascending=True)]),  # K, then M
    )


def specification(view: "Workspace") -> dict[str, Any]:
    """Return what W&B would store of the workspace, in a form that is the same each time."""
    whole: dict[str, Any] = without_ids(view._spec)  # the package has no public way to it
    return whole


def without_ids(node: Any) -> Any:
    """Return a specification without its panels' ids, which are drawn anew each time."""
    if isinstance(node, dict):
        return {name: without_ids(value) for name, value in node.items() if name != "__id__"}
    return [without_ids(value) for value in node] if isinstance(node, list) else node


def _throughput() -> "Section":
    return _section(
        "throughput",
        _over_micro_batches("samples_per_s", "Samples per second"),
        _over_micro_batches("tokens_per_s", "Tokens per second"),
        _over_micro_batches("speedup", "Speed-up over one device"),
        _bars("step_s", "Step, s"),
        _figure("throughput"),
        _figure("schedules"),
    )


def _bubble() -> "Section":
    return _section(
        "bubble",
        _over_micro_batches("bubble", "Bubble fraction: measured, replayed, bound"),
        _bars("bubble_fraction", "Bubble fraction, measured"),
        _bars("bubble_replayed", "Bubble fraction, replayed"),
        _bars("bubble_bound", "Bubble fraction, bound"),
        _scatter("bubble_bound", "bubble_fraction", "Measured against bound"),
        _figure("bubble"),
    )


def _memory() -> "Section":
    return _section(
        "memory",
        _over_micro_batches("peak_memory_mib", "Peak memory of the largest rank, MiB"),
        _bars("peak_memory_bytes", "Peak memory of the largest rank, bytes"),
        _bars("peak_rss_bytes", "Largest resident set of a worker, bytes"),
        _scatter("peak_memory_bytes", "step_s", "Step against peak memory"),
    )


def _ledger() -> "Section":
    return _section("ledger", *(_bars(f"ledger_{part}", _title(part)) for part in PARTS))


def _title(part: str) -> str:
    return f"{part.removesuffix('_s').replace('_', ' ').capitalize()}, s of the step"


def _training() -> "Section":
    return _section(
        "training",
        _over_training_steps("loss", "Loss"),
        _over_training_steps("step_s", "Step, s"),
        _over_training_steps("bubble_fraction", "Bubble fraction of each step"),
        _bars("grad_rel_error", "Largest relative gradient error"),
    )


def _section(name: str, *panels: "LinePlot | BarPlot | ScatterPlot | MediaBrowser") -> "Section":
    import wandb_workspaces.workspaces as ws

    return ws.Section(name=name, panels=list(panels), is_open=True)


def _over_micro_batches(chart: str, title: str) -> "LinePlot":
    """Return all series of a chart of the sweeps' own runs: the names that `curves` gives them, as W&B has them."""
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(
        title=title, x=MICRO_BATCHES, metric_regex=f"^{chart}/", title_x="micro-batches M", max_runs_to_show=MOST_RUNS
    )


def _over_training_steps(name: str, title: str) -> "LinePlot":
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(title=title, x=TRAINING_STEP, y=[name], title_x="training step", max_runs_to_show=MOST_RUNS)


def _bars(column: str, title: str) -> "BarPlot":
    """Return a bar for each point: a column of results.csv, which its run has as summary."""
    import wandb_workspaces.reports.v2 as wr

    return wr.BarPlot(title=title, metrics=[column], max_runs_to_show=MOST_RUNS, max_bars_to_show=MOST_RUNS)


def _scatter(x: str, y: str, title: str) -> "ScatterPlot":
    import wandb_workspaces.reports.v2 as wr

    return wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(y))


def _figure(name: str) -> "MediaBrowser":
    """Return one of the report's pictures."""
    import wandb_workspaces.reports.v2 as wr

    return wr.MediaBrowser(title=f"{name}.png", media_keys=[f"figures/{name}"])


if __name__ == "__main__":
    sys.exit(main())
