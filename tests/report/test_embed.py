"""Tables in Markdown files are those of the result files; this repository's own are checked against them."""

import re
import shutil
from pathlib import Path

import pytest
from hand_made import four_points
from PIL import Image, ImageChops

from pipebench.report.embed import embedded, main
from pipebench.report.sweep import read_sweep
from pipebench.report.write import write_report
from pipebench.schedule.__main__ import main as draw_schedules

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = sorted(path.parent for path in (ROOT / "results").glob("*/sweep.json"))


def test_a_table_is_filled_in_and_filled_in_again(tmp_path: Path) -> None:
    four_points(tmp_path / "sweep")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: sweep samples-1 -->\n<!-- end of table -->\nafter\n")
    assert main([str(page)]) == 0
    first = page.read_text()
    assert first.startswith("before\n<!-- table: sweep samples-1 -->\n\n|     |")
    assert "| K=2 |  2.00 | **wrong** |\n\n<!-- end of table -->\nafter\n" in first
    page.write_text(first.replace("2.00", "9.99"))
    assert main([str(page)]) == 0
    assert page.read_text() == first


@pytest.mark.parametrize(
    ("place", "error"), [("sweep nothing", "expected one of points, samples-1"), ("elsewhere x", "cannot be read")]
)
def test_a_table_that_is_not_there_is_one_line(
    place: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four_points(tmp_path / "sweep")
    page = tmp_path / "page.md"
    page.write_text(f"<!-- table: {place} -->\n<!-- end of table -->\n")
    assert main([str(page)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("ResultError: ")
    assert error in told
    assert told.count("\n") == 1


def test_the_readme_shows_what_the_results_say() -> None:
    assert (ROOT / "README.md").read_text() == embedded(ROOT / "README.md"), "make readme-results brings them together"


@pytest.mark.parametrize("folder", SWEEPS, ids=lambda folder: folder.name)
def test_committed_reports_are_what_their_raw_files_give(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / folder.name
    copy.mkdir()
    shutil.copy(folder / "sweep.json", copy)
    shutil.copytree(folder / "runs", copy / "runs")
    for path in write_report(read_sweep(copy), ("md", "png")):
        if path.suffix in (".md", ".csv"):
            assert path.read_text() == (folder / path.name).read_text(), "make readme-results brings them together"
        else:
            assert_looks_like(path, folder / path.name)


def assert_looks_like(here: Path, committed: Path) -> None:
    """Pass over what another processor may round otherwise at the edge of a line, and over nothing else."""
    with Image.open(here) as drawn, Image.open(committed) as shown:
        assert drawn.size == shown.size, f"{committed}: make readme-results draws it anew"
        differences = ImageChops.difference(drawn.convert("RGB"), shown.convert("RGB")).getextrema()
    assert max(largest for _, largest in differences) < 64, f"{committed}: make readme-results draws it anew"


def test_the_schedules_side_by_side_are_what_the_command_below_them_draws(tmp_path: Path) -> None:
    [command] = re.findall(
        r"python -m pipebench\.schedule (.*) --svg results/schedules\.svg", (ROOT / "README.md").read_text()
    )
    assert f"{command} --svg results/schedules.svg" in (ROOT / "Makefile").read_text()
    assert draw_schedules([*command.split(), "--svg", str(tmp_path / "drawn.svg")]) == 0
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / "results" / "schedules.svg").read_text()
