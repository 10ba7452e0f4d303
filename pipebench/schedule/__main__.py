"""`python -m pipebench.schedule`: draw schedules and say what they cost, before anything is trained."""

import json
import math
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pipebench.errors import ConfigError, PipebenchError, ScheduleError
from pipebench.metrics import bubble_fraction, critical_path
from pipebench.render import ascii_picture, ascii_width, chrome_trace, natural_unit_s, svg_picture
from pipebench.schedule.action import Op, Schedule
from pipebench.schedule.bounds import PassCosts, bubble_bound
from pipebench.schedule.builders import SCHEDULES, Recompute, with_recompute
from pipebench.schedule.catalogue import ZB_AUTO, build, is_file
from pipebench.schedule.memory import StageActivations, peak_activation_bytes
from pipebench.schedule.search import Found, search
from pipebench.schedule.simulate import Costs, simulate
from pipebench.schedule.text import load_csv, to_csv
from pipebench.schedule.validate import validate
from pipebench.trace import Trace

_MOST_BOXES = 50_000
"""Actions that a picture or a Perfetto file holds at most: browsers give up on more."""

_MOST_RANKS = 16
"""Ranks whose numbers are written out; of more, the most and the least."""


@dataclass(frozen=True, slots=True)
class Study:
    """One schedule, and what is known about it at the costs asked for.

    Peaks are micro-batches of a whole rank, from a forward to its (input) gradient and to its weight gradient; a
    rank with two stages holds half a one for each. `found` is what a search said, where there was one.
    """

    schedule: Schedule
    trace: Trace
    bound: float | None
    until_input: list[float]
    until_weight: list[float]
    found: Found | None

    @property
    def name(self) -> str:
        return self.schedule.name


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 for what cannot be drawn."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.names is None:
        parser.print_help()
        return 0
    try:
        _run(arguments)
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    except PipebenchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error, ScheduleError) and error.grid:
            print(error.grid, file=sys.stderr)
        return 2
    return 0


def _parser() -> ArgumentParser:
    summaries = _summaries()
    width = max(map(len, summaries))
    listed = [f"  {name:{width}}  {summary}" for name, summary in summaries.items()]
    parser = ArgumentParser(
        prog="python -m pipebench.schedule",
        description="Draw pipeline schedules and say what they cost: time, idle share, micro-batches held.",
        epilog="\n".join(["schedules:", *listed]),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="?", metavar="NAME[,NAME...]", help="schedules, or .csv files of actions")
    parser.add_argument("num_ranks", nargs="?", type=int, metavar="K", help="ranks; may be left out for files")
    parser.add_argument("num_micro_batches", nargs="?", type=int, metavar="M", help="micro-batches in a mini-batch")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages a rank, where the schedule leaves a choice")
    parser.add_argument("--recompute", choices=[each.value for each in Recompute], default="never")
    parser.add_argument("--costs", default="1,1,1", metavar="F,I,W", help="seconds a rank spends on a micro-batch; "
                        "F,B halves B into I and W; a recompute costs F (default: %(default)s)")  # fmt: skip
    parser.add_argument("--limit", type=float, metavar="X", help=f"micro-batches a rank of {ZB_AUTO} may hold from F "
                        "to W; 1F1B's first holds K (default: K)")  # fmt: skip
    parser.add_argument("--transfer", type=float, default=0.0, metavar="SECONDS", help="from rank to rank")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the one schedule's actions")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of all schedules")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write the one schedule for ui.perfetto.dev")
    return parser


def _summaries() -> dict[str, str]:
    lines = {name: (recipe.build.__doc__ or "").partition("\n")[0] for name, recipe in SCHEDULES.items()}
    return lines | {ZB_AUTO: "The fastest order that a search finds within --limit, at these costs; --chunks 1 or 2."}


def _run(arguments: Namespace) -> None:
    names = arguments.names.split(",")
    for option in ("csv", "perfetto"):
        if getattr(arguments, option) and len(names) > 1:
            raise ConfigError(f"--{option} with {len(names)} schedules: expected one")
    if arguments.limit is not None and ZB_AUTO not in names:
        raise ConfigError(f"--limit with schedule={arguments.names}: expected {ZB_AUTO}, the one that heeds it")
    costs = _costs(arguments)
    studies = [_study(name, names, arguments, costs) for name in names]
    for study in studies:
        print("\n".join([*_lines(study, arguments.transfer), ""]))
    if len(studies) > 1:
        print("\n".join(_table(studies)))
    _write(arguments, studies)


def _costs(arguments: Namespace) -> PassCosts:
    try:
        seconds = [float(part) for part in arguments.costs.split(",")]
    except ValueError:
        seconds = []
    if len(seconds) not in (2, 3) or not all(0 < each < math.inf for each in seconds):
        raise ConfigError(f"--costs {arguments.costs}: expected F,B or F,I,W in seconds above 0, such as 1,2 or 1,1,1")
    if not 0 <= arguments.transfer < math.inf:
        raise ConfigError(f"--transfer {arguments.transfer}: expected seconds, at least 0")
    return PassCosts(*seconds) if len(seconds) == 3 else PassCosts(seconds[0], seconds[1] / 2, seconds[1] / 2)


def _study(name: str, names: Sequence[str], arguments: Namespace, costs: PassCosts) -> Study:
    found = _search(arguments, costs) if name == ZB_AUTO else None
    schedule = found.schedule if found else _schedule(name, names, arguments)
    validate(schedule)
    share = [1 / len(schedule.stages_of_rank(rank)) for rank in schedule.stage_ranks]
    trace = simulate(schedule, _stage_costs(costs, share), arguments.transfer)
    until_input, until_weight = (
        peak_activation_bytes(schedule, _kept(share, of_weight, arguments.recompute)) for of_weight in (0.0, 1.0)
    )
    return Study(schedule, trace, _bound(schedule, costs), until_input, until_weight, found)


def _schedule(name: str, names: Sequence[str], arguments: Namespace) -> Schedule:
    recompute = Recompute(arguments.recompute)
    if arguments.num_micro_batches is None and is_file(name):
        return with_recompute(load_csv(Path(name)), recompute)
    _refuse_without_sizes(name, arguments)
    nobody_takes_it = not any(map(_takes_chunks, names))  # then it is for the schedule to refuse
    chunks = arguments.chunks if nobody_takes_it or _takes_chunks(name) else None
    return with_recompute(build(name, arguments.num_ranks, arguments.num_micro_batches, chunks), recompute)


def _takes_chunks(name: str) -> bool:
    recipe = SCHEDULES.get(name)
    return name == ZB_AUTO or (recipe is not None and recipe.least_chunks != recipe.most_chunks)


def _refuse_without_sizes(name: str, arguments: Namespace) -> None:
    if arguments.num_micro_batches is None:
        raise ConfigError(f"schedule={name!r} without sizes: expected NAME K M, or a .csv file")
    if min(arguments.num_ranks, arguments.num_micro_batches) < 1:
        raise ConfigError(f"{name} {arguments.num_ranks} {arguments.num_micro_batches}: expected K and M of at least 1")


def _search(arguments: Namespace, costs: PassCosts) -> Found:
    """Look for the best order where a micro-batch of a rank counts as one byte, from its F to its W."""
    _refuse_without_sizes(ZB_AUTO, arguments)
    chunks = 1 if arguments.chunks is None else arguments.chunks
    limit = arguments.num_ranks if arguments.limit is None else arguments.limit
    if chunks not in (1, 2):
        raise ConfigError(f"--chunks {chunks}: expected 1 or 2 with schedule={ZB_AUTO}")
    if not limit >= 1:
        raise ConfigError(f"--limit {limit:g}: expected at least 1, one micro-batch at a time")
    share = [1 / chunks] * (arguments.num_ranks * chunks)
    return search(
        arguments.num_ranks,
        arguments.num_micro_batches,
        chunks,
        _stage_costs(costs, share),
        _kept(share, 1.0, arguments.recompute),
        limit,
        arguments.transfer,
        Recompute(arguments.recompute),
    )


def _kept(share: Sequence[float], of_weight: float, recompute: str) -> list[StageActivations]:
    """Return what each stage keeps, in micro-batches of its rank; the input that a recompute starts from is nothing."""
    return [StageActivations(part, 0.0 if recompute != "never" else part, part * of_weight) for part in share]


def _bound(schedule: Schedule, costs: PassCosts) -> float | None:
    again = schedule.place.get(Op.RECOMPUTE)
    recomputed = 0.0 if again is None else float((again[0] >= 0).mean())
    mean = PassCosts(costs.forward_s, costs.input_s, costs.weight_s, costs.forward_s * recomputed)
    chunks = schedule.num_stages // schedule.num_ranks
    return bubble_bound(schedule.name, schedule.num_ranks, schedule.num_micro_batches, chunks, mean)


def _stage_costs(costs: PassCosts, share: Sequence[float]) -> Costs:
    of_rank = {
        Op.FORWARD: costs.forward_s,
        Op.BACKWARD: costs.backward_s,
        Op.INPUT_GRADIENT: costs.input_s,
        Op.WEIGHT_GRADIENT: costs.weight_s,
        Op.RECOMPUTE: costs.forward_s,
    }
    return {(stage, op): seconds * part for stage, part in enumerate(share) for op, seconds in of_rank.items()}


def _lines(study: Study, transfer_s: float) -> list[str]:
    schedule, trace = study.schedule, study.trace
    return [
        f"{study.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches",
        _picture(trace),
        f"makespan         {trace.makespan_s:.6g} s, longest rank's own span {trace.longest_stage_span_s:.6g} s",
        f"bubble fraction  {bubble_fraction(trace):.4f}, {_bound_in_words(study, transfer_s)}",
        *_held(study),
        f"critical path    {_path(schedule, trace, transfer_s)}",
        *_search_in_words(study),
    ]


def _bound_in_words(study: Study, transfer_s: float) -> str:
    if study.bound is None:
        return "no closed form at these sizes and costs"
    exact = transfer_s > 0 or math.isclose(study.bound, bubble_fraction(study.trace), abs_tol=1e-9)
    words = "the fill alone" if study.found else "closed form" if exact else "at least"
    return f"{words} {study.bound:.4f}{' with free transfers' if transfer_s else ''}"


def _search_in_words(study: Study) -> list[str]:
    if study.found is None:
        return []
    found = study.found
    known = f"best hand-written {found.best_known}, {found.best_known_s:.6g} s" if found.best_known else "no other fits"
    limit = f"{found.limit_bytes:g} micro-batches a rank"
    return [f"search           predicted {found.predicted_s:.6g} s within {limit}; {known}"]


def _picture(trace: Trace) -> str:
    """Draw what fits the terminal: with exact edges, or else edges rounded to the shortest action."""
    room = shutil.get_terminal_size(fallback=(160, 50)).columns
    exact_s, shortest_s = natural_unit_s(trace), natural_unit_s(trace, finest=1)
    if ascii_width(trace, exact_s) <= room:
        return ascii_picture(trace, exact_s)
    if ascii_width(trace, shortest_s) <= room:
        return f"{ascii_picture(trace, shortest_s)}\n(times rounded to {shortest_s:g} s: --svg FILE draws them exactly)"
    return f"(the picture is {ascii_width(trace)} characters wide, the terminal {room}: --svg FILE draws it)"


def _held(study: Study) -> list[str]:
    """Say how many micro-batches each rank holds at most, until what frees them; in one line where that is `B`."""
    ends = [
        " or ".join(str(op) for op in (Op.BACKWARD, part) if op in study.schedule.place)
        for part in (Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
    ]
    lines = [
        f"{_by_rank(peaks)} micro-batches by rank from F to {end}"
        for peaks, end in zip((study.until_input, study.until_weight), ends, strict=True)
    ]
    return [f"{label:16} {line}" for label, line in zip(("peak held", ""), dict.fromkeys(lines), strict=False)]


def _by_rank(peaks: Sequence[float]) -> str:
    if len(peaks) <= _MOST_RANKS:
        return " ".join(f"{peak:.3g}" for peak in peaks)
    most, least = max(peaks), min(peaks)
    return f"at most {most:.6g} (rank {peaks.index(most)}), at least {least:.6g} (rank {peaks.index(least)})"


def _path(schedule: Schedule, trace: Trace, transfer_s: float) -> str:
    spans = critical_path(schedule, trace, transfer_s)
    counts = Counter(span.action.op for span in spans)
    ops = ", ".join(f"{counts[op]} {op}" for op in Op if counts[op])
    hops = sum(before.rank != after.rank for before, after in pairwise(spans))
    waits_s = trace.makespan_s - sum(span.duration_s for span in spans)
    return f"{ops}, {hops} changes of rank, {max(0.0, waits_s):.6g} s of waits"


def _table(studies: Sequence[Study]) -> list[str]:
    head = ["schedule", "stages", "makespan_s", "span_s", "bubble", "closed form", "held F-I", "held F-W"]
    body = [
        [
            study.name,
            f"{study.schedule.num_stages}",
            f"{study.trace.makespan_s:.6g}",
            f"{study.trace.longest_stage_span_s:.6g}",
            f"{bubble_fraction(study.trace):.4f}",
            "-" if study.bound is None else f"{study.bound:.4f}",
            f"{max(study.until_input):.4g}",
            f"{max(study.until_weight):.4g}",
        ]
        for study in studies
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return [
        "  ".join(
            [f"{line[0]:{widths[0]}}", *[f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]]
        )
        for line in [head, *body]
    ]


def _write(arguments: Namespace, studies: Sequence[Study]) -> None:
    num_boxes = max(study.schedule.num_actions for study in studies)
    if (arguments.svg or arguments.perfetto) and num_boxes > _MOST_BOXES:
        raise ConfigError(f"--svg, --perfetto: {num_boxes} actions: expected at most {_MOST_BOXES} in a picture")
    if arguments.csv:
        _write_text(arguments.csv, to_csv(studies[0].schedule))
    if arguments.svg:
        _write_text(arguments.svg, svg_picture([(study.name, study.trace) for study in studies]))
    if arguments.perfetto:
        _write_text(arguments.perfetto, json.dumps(chrome_trace(studies[0].trace)))


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: expected a file that can be written: {error}") from error
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
