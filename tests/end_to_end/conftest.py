"""The table of faults: what was promised, and what was seen, of every test that says so.

`--faults-table FILE` writes it as Markdown; it is printed in any case.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

TITLE = "# Faults: what was promised, and what was seen"
_TOLD = pytest.StashKey[dict[str, tuple[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", type=Path, help="write the table of faults here")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TOLD] = {}


@pytest.fixture
def promise(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Return what notes a fault, the outcome promised and the one seen; the last word about a fault counts."""

    def note(fault: str, promised: str, seen: str) -> None:
        request.config.stash[_TOLD][fault] = (promised, seen)

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    told = config.stash[_TOLD]
    if not told:
        return
    lines = ["| fault | promised | seen |", "| --- | --- | --- |"]
    lines += [f"| {fault} | {promised} | {seen} |" for fault, (promised, seen) in told.items()]
    terminalreporter.section("faults")
    terminalreporter.write("\n".join([*lines, ""]))
    path = config.getoption("faults_table", None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([TITLE, "", *lines, ""]))
