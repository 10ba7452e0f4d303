"""`python -m pipebench.report DIR`: rebuild the tables and pictures of a sweep from its files."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipebench.config import closest
from pipebench.errors import ConfigError, ResultError
from pipebench.report.sweep import read_sweep
from pipebench.report.write import FORMATS, USUAL, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Print the paths written and return the exit code: 2 for no readable sweep or an unknown format."""
    parser = argparse.ArgumentParser(
        prog="python -m pipebench.report",
        description="Write the report of a sweep into its folder, from its files alone.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a sweep, such as results/<time>-quick")
    parser.add_argument(
        "--format",
        default=",".join(USUAL),
        metavar="LIST",
        help=f"some of {', '.join(FORMATS)}, with commas (default: %(default)s); results.csv comes with all. "
        "latex and csv write every table into tables/, png, svg and pdf every figure",
    )
    options = parser.parse_args(argv)
    try:
        written = write_report(read_sweep(options.folder), _formats(options.format))
    except (ConfigError, ResultError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


def _formats(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FORMATS:
            expected = f"expected some of {', '.join(FORMATS)}, with commas{closest(name, FORMATS)}"
            raise ConfigError(f"--format={text}: {name!r}: {expected}")
    return names


if __name__ == "__main__":
    sys.exit(main())
