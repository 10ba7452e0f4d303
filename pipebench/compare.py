"""`python -m pipebench.compare A B`: is the candidate B slower than the baseline A? Markdown for a pull request.

Exit code 0 when every point is the same or faster, 1 when one is slower or broken, 3 when one is undecided or no point
has a result, 2 for what must not be compared.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipebench.errors import CompareError, ResultError
from pipebench.report.cells import LEGEND, MARKS, NOTHING, bubble, escape, kind, marks, milliseconds
from pipebench.report.comparison import ACROSS, LEAST_FLOOR, Comparison, Pair, Verdict, compare, environment_of
from pipebench.report.noise import percent
from pipebench.report.sweep import Sweep, read_sweep
from pipebench.report.table import Cell, Table, cells, markdown
from pipebench.rows import Row

VERDICTS = {
    Verdict.BROKEN: "a result in A, none in B",
    Verdict.SLOWER: "the interval lies above 1, and the ratio above the noise floor",
    Verdict.UNDECIDED: "too much scatter to say one or the other, or not run in one of them",
    Verdict.NO_RESULT: "a result in neither",
    Verdict.SAME: "the ratio lies within the noise floor, and the whole interval within twice the floor",
    Verdict.FASTER: "the interval lies below 1, and the ratio below 1 / the noise floor",
    Verdict.FIXED: "no result in A, one in B",
}

VERSIONS = ("git", "pipebench", "torch", "numpy", "python")
"""What may well differ between two sweeps, of the names in their environment."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison and return the exit code."""
    options = _parser().parse_args(argv)
    try:
        a, b = read_sweep(options.a), read_sweep(options.b)
        comparison = compare(a, b, options.across)
        text = page(a, b, comparison, [folder.resolve().name for folder in (options.a, options.b)])
        if options.output is not None:
            _write(options.output, text)
    except (CompareError, ResultError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return exit_code(comparison)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipebench.compare",
        description="Compare the step times of two sweeps point by point, in Markdown.",
        epilog="Exit code: 0 same or faster, 1 slower or broken, 3 undecided, 2 not to be compared.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="folder of the baseline sweep")
    parser.add_argument("b", type=Path, metavar="B", help="folder of the candidate sweep")
    parser.add_argument(
        "--across",
        type=_permitted,
        default=(),
        metavar="WHAT",
        help=f"compare although these differ, and say so: some of {','.join(ACROSS)} (ranks per device)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown into this file as well")
    return parser


def _permitted(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(ACROSS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {', '.join(ACROSS)}")
    return names


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ResultError(f"{path}: the comparison cannot be written: {error}") from error


def exit_code(comparison: Comparison) -> int:
    verdicts = {pair.verdict for pair in comparison.pairs}
    if verdicts & {Verdict.BROKEN, Verdict.SLOWER}:
        return 1
    return 3 if Verdict.UNDECIDED in verdicts or verdicts == {Verdict.NO_RESULT} else 0


def page(a: Sweep, b: Sweep, comparison: Comparison, folders: Sequence[str]) -> str:
    """Return the whole Markdown; `folders` are what to call the two."""
    parts = [
        f"**{headline(comparison.pairs)}**",
        *(
            f"**Across {each.name}**: A has {escape(each.a)}, B has {escape(each.b)}."
            for each in comparison.differences
        ),
        markdown(_setting([a, b], folders)),
        markdown(_verdicts(comparison.pairs)),
        *_without_ratio(comparison.pairs),
        *_unpaired(comparison),
        _noise(comparison),
        _legend(comparison.pairs),
    ]
    return "\n\n".join(parts) + "\n"


def headline(pairs: Sequence[Pair]) -> str:
    """Return such as `2 of 9 points slower, 1 undecided, 6 same.`"""
    counts = {verdict: sum(pair.verdict is verdict for pair in pairs) for verdict in Verdict}
    first, *others = [(verdict.value, count) for verdict, count in counts.items() if count]
    rest = "".join(f", {count} {name}" for name, count in others)
    return f"{first[1]} of {len(pairs)} point{'s' if len(pairs) != 1 else ''} {first[0]}{rest}."


def _setting(sweeps: Sequence[Sweep], folders: Sequence[str]) -> Table:
    """Return what the two are: their folders, the code that ran, and where."""
    lines = [cells(("folder", *folders))]
    for name in VERSIONS:
        known = ([str(result.environment.get(name, "")) for result in sweep.results.values()] for sweep in sweeps)
        lines.append(cells((name, *(" / ".join(dict.fromkeys(values)) or NOTHING for values in known))))
    lines.append(cells(("machine", *(environment_of(sweep, "machine") or NOTHING for sweep in sweeps))))
    return Table("setting", "What is compared", ("", "A, the baseline", "B, the candidate"), tuple(lines), 3)


def _verdicts(pairs: Sequence[Pair]) -> Table:
    header = ("point", "verdict", "B / A", "95 %", "A ms", "B ms", "memory B / A", "bubble of A", "bubble of B")
    return Table("verdicts", "B against A", header, tuple(_line(pair) for pair in pairs), 2)


def _line(pair: Pair) -> tuple[Cell, ...]:
    a, b, ratio = pair.a, pair.b, pair.ratio
    peaks = a["peak_memory_bytes"], b["peak_memory_bytes"]
    return cells(
        (
            pair.name,
            pair.verdict.value,
            f"{ratio.value:.3f}" if ratio else NOTHING,
            f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio else NOTHING,
            milliseconds(a["step_s"]) + marks(a) + kind(a),
            milliseconds(b["step_s"]) + marks(b) + kind(b),
            f"{peaks[1] / peaks[0]:.3f}" if all(peaks) else NOTHING,
            bubble(a, " / "),
            bubble(b, " / "),
        )
    )


def _without_ratio(pairs: Sequence[Pair]) -> list[str]:
    """Say of points without a result in one sweep what became of them in both."""

    def state(row: Row) -> str:
        return f"{row['status']}: {row['message']}" if row["message"] else str(row["status"])

    told = [f"{pair.name}: A {state(pair.a)}; B {state(pair.b)}" for pair in pairs if pair.ratio is None]
    return ["\n".join(f"- {escape(line)}" for line in told)] if told else []


def _unpaired(comparison: Comparison) -> list[str]:
    """List what only one sweep has; no verdict depends on it."""
    only = {"A": comparison.only_a, "B": comparison.only_b}
    lines = [f"- only in {which}: {escape('; '.join(names))}" for which, names in only.items() if names]
    return ["\n".join(lines)] if lines else []


def _noise(comparison: Comparison) -> str:
    if comparison.assumed:
        origin = "assumed, since neither sweep measured one"
    elif comparison.floor == LEAST_FLOOR:
        origin = "the least that is taken, since less was measured"
    else:
        origin = "the larger of what was measured"
    each = "\n".join(f"- {which}: {escape(words)}" for which, words in zip("AB", comparison.noise, strict=True))
    return f"**Noise floor** {percent(comparison.floor)}, {origin}.\n\n{each}"


def _legend(pairs: Sequence[Pair]) -> str:
    used = "".join(marks(row) for pair in pairs for row in (pair.a, pair.b))
    meanings = {verdict.value: meaning for verdict, meaning in VERDICTS.items()}
    meanings |= {mark: LEGEND[mark] for mark in MARKS if mark in used}
    lines = "\n".join(f"- `{mark}` {escape(meaning)}" for mark, meaning in meanings.items())
    return f"<details><summary>How to read this</summary>\n\n{HOW_TO_READ}\n\n{lines}\n\n</details>"


HOW_TO_READ = """\
B / A is the ratio of median step times, above 1 where B is slower, with its 95 % bootstrap interval: groups of
processes are drawn first, then steps inside them. Verdicts are about step time alone. Simulated points are exact, so
no noise floor counts for them. Memory is the peak of the largest rank. Bubbles are idle over makespan: measured /
replayed with the measured costs, every rank on a device of its own / the closed form of the schedule."""


if __name__ == "__main__":
    sys.exit(main())
