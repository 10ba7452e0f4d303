"""A guard against regressions: what a run of the speed targets has to say against an earlier one, in words.

Each part's sweep is compared with the earlier one's by the rules of `python -m pipebench.compare`, and each target by
whether it was met.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from pipebench.compare import headline
from pipebench.errors import CompareError, ResultError
from pipebench.harness.sweep import SWEEP_FILE
from pipebench.perf.targets import Finding
from pipebench.report.comparison import Pair, Verdict, compare
from pipebench.report.noise import percent
from pipebench.report.sweep import read_sweep

_WORSE = (Verdict.BROKEN, Verdict.SLOWER)


def against(earlier: Path, folder: Path, findings: Sequence[Finding]) -> list[str]:
    """Return lines of Markdown: for each part that `folder` measured what became of its points, then of the targets."""
    parts = [path.parent.name for path in sorted(folder.glob(f"*/{SWEEP_FILE}"))]
    lines = [f"- {name}: {_part_in_words(earlier / name, folder / name)}" for name in parts]
    return [f"Against {earlier}:", "", *lines, f"- targets: {_targets_in_words(earlier, findings)}"]


def _part_in_words(earlier: Path, later: Path) -> str:
    if not (earlier / SWEEP_FILE).is_file():
        return "not measured then."
    try:
        comparison = compare(read_sweep(earlier), read_sweep(later), ())
    except (CompareError, ResultError) as error:
        return f"not compared: {error}."
    worse = "; ".join(_named(pair) for pair in comparison.pairs if pair.verdict in _WORSE)
    floor = f"noise floor {percent(comparison.floor)}{', assumed' if comparison.assumed else ''}"
    more = f"python -m pipebench.compare {earlier} {later}"
    return f"{headline(comparison.pairs)[:-1]}{f' ({worse})' if worse else ''}; {floor}; `{more}`"


def _named(pair: Pair) -> str:
    if pair.ratio is None:
        return f"{pair.name}: {pair.verdict.value}"
    return f"{pair.name}: {pair.ratio.value:.3f}, 95 % {pair.ratio.low:.3f} to {pair.ratio.high:.3f}"


def _targets_in_words(earlier: Path, findings: Sequence[Finding]) -> str:
    """Say which targets were met then and are missed now, and the other way round; new limits count for both."""
    try:
        content = json.loads((earlier / "perf.json").read_text())
        then = {
            each["target"]: {"measured": each["measured"], "interval": each.get("interval")}
            for each in content["findings"]
        }
        shared = [
            (finding, dataclasses.replace(finding, **then[finding.target]).met)
            for finding in findings
            if finding.target in then
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"not compared: {earlier / 'perf.json'} cannot be read: {error}."
    lost = ", ".join(finding.target for finding, met in shared if met and not finding.met)
    gained = ", ".join(finding.target for finding, met in shared if finding.met and not met)
    told = [
        f"met then and missed now: {lost}" if lost else "",
        f"missed then and met now: {gained}" if gained else "",
    ]
    return f"of {len(shared)} measured both times, {'; '.join(filter(None, told)) or 'none changed sides'}."
