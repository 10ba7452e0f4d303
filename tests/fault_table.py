"""The table of faults: what was promised, and what was seen, of every test that says so.

A test says it with the mark `fault(fault, promised)`, whose words may hold names of the test's parameters in braces;
one with the bare mark and the fixture `promise` tells what it saw in more than a word. `pytest tests -m fault` runs
them all; `--faults-table FILE` writes the table as Markdown; it is printed in any case.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TITLE = "# Faults: what was promised, and what was seen"
_TOLD = pytest.StashKey[dict[str, tuple[str, str]]]()

AS_PROMISED = "so it was"
BROKEN = "**broken**"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", type=Path, help="write the table of faults here")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TOLD] = {}
    config.addinivalue_line("markers", "fault(fault, promised): a line of the table of faults")


@pytest.fixture
def promise(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Return what notes a fault, the outcome promised and the one seen; the last word about a fault counts."""

    def note(fault: str, promised: str, seen: str) -> None:
        request.config.stash[_TOLD][fault] = (promised, seen)

    return note


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note what a marked test saw: it failed, was skipped for a reason, or saw what it expects."""
    report: pytest.TestReport = yield  # type: ignore[misc]
    mark = item.get_closest_marker("fault")
    if mark is not None and mark.args and (report.when == "call" or not report.passed):
        values = item.callspec.params if hasattr(item, "callspec") else {}
        fault, promised = (str(words).format(**values) for words in mark.args)
        skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        seen = AS_PROMISED if report.passed else f"not tried: {skipped}" if report.skipped else BROKEN
        item.config.stash[_TOLD][fault] = (promised, seen)
    return report  # type: ignore[return-value]


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
