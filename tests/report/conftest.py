"""A sweep made by hand, with and without its report."""

from pathlib import Path

import pytest
from hand_made import WRITTEN, four_points

from pipebench.report.sweep import read_sweep
from pipebench.report.write import write_report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep of four points: one fine, one wrong, one failed, one not run."""
    return four_points(tmp_path)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same four points with their report, for tests that only read it."""
    folder = four_points(tmp_path_factory.mktemp("reported"))
    written = write_report(read_sweep(folder))
    assert [path.name for path in written] == WRITTEN
    return folder
