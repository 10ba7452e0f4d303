"""`python -m pipebench.report DIR`: rebuild the tables and pictures of a sweep from its files."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipebench.errors import ResultError
from pipebench.report.write import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Print the paths written and return the exit code: 2 when the folder holds no readable sweep."""
    parser = argparse.ArgumentParser(
        prog="python -m pipebench.report",
        description="Write results.csv, report.md and pictures of a sweep into its folder, from its files alone.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a sweep, such as results/<time>-quick")
    folder = parser.parse_args(argv).folder
    try:
        written = write_report(folder)
    except ResultError as error:
        print(f"ResultError: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
