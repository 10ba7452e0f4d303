"""`make perf`: measure the speed targets, and compare every point with the last run that was kept.

It prints what was measured beside each target, and in words what changed against that run, and writes the same to a
file; it never fails a build, since a shared machine's times are evidence, not a verdict.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from pipebench.harness.sweep import make_folder
from pipebench.perf.guard import against
from pipebench.perf.targets import PARTS, Finding
from pipebench.record import write_json


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipebench.perf", description="Measure the speed targets.")
    parser.add_argument("--repeats", type=int, default=5, help="fresh process groups per point (default 5)")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where to keep the raw files")
    parser.add_argument(
        "--against",
        type=Path,
        default=Path("results/perf"),
        metavar="FOLDER",
        help="the run to compare with (default %(default)s, the last one that was kept)",
    )
    parser.add_argument("parts", nargs="*", help=f"what to measure: {', '.join(PARTS)} (default: all)")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    folder = make_folder(options.results_dir, "perf")
    findings = [finding for name in options.parts or PARTS for finding in PARTS[name](folder, options.repeats)]
    write_json(folder / "perf.json", {"findings": [dataclasses.asdict(finding) for finding in findings]})
    text = "\n".join([_table(findings), "", *against(options.against, folder, findings)])
    print(text)
    (folder / "perf.md").write_text(text + "\n")
    print(f"\nraw files  {folder}")
    return 0


def _table(findings: Sequence[Finding]) -> str:
    rows = [
        (
            f"{finding.target} ({finding.detail})" if finding.detail else finding.target,
            f"{finding.measured:.3f}",
            f"{finding.interval[0]:.3f} to {finding.interval[1]:.3f}" if finding.interval else "",
            f"at most {finding.limit}",
            "met" if finding.met else "not told apart from 1" if finding.measured <= finding.limit else "missed",
        )
        for finding in findings
    ]
    return tabulate(rows, headers=("target", "measured", "95 % interval", "wanted", ""), tablefmt="github")


if __name__ == "__main__":
    sys.exit(main())
