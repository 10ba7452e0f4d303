"""A sweep's folder may come from anyone: its words stay words in every format, and its links lead nowhere."""

import csv
import dataclasses
import re
from pathlib import Path

import pytest
from hand_made import ERROR, OK, config, four_points, result, write_sweep

from pipebench.config import SyntheticConfig
from pipebench.errors import ResultError
from pipebench.report.sweep import read_sweep
from pipebench.report.write import FORMATS, write_report

FORMULAS = ("=HYPERLINK(1)", "+1+cmd", "-2+3+cmd", "@SUM(A1)", "\t=1", "\r=1")
MARKUP = "</td><script>alert(1)</script>|[a](javascript:alert(1))`*_~ \\input{/etc/passwd} $x^2$ %&#{}"


def hostile_sweep(folder: Path, text: str) -> Path:
    model = SyntheticConfig(
        name=text, layers=2, width=8, forward_s=1.0, backward_s=2.0, weight_share=0.5, imbalance=0.0
    )
    points = {OK: config(model=model), ERROR: config(model=dataclasses.replace(model, name=text[::-1]), micro=4)}
    results = [
        result(OK, points[OK], environment={text: text}, message=text, flags=[text]),
        result(ERROR, points[ERROR], status="error", message=text, repeats=[], rows=[]),
    ]
    write_sweep(folder, points, results, ["stages", "micro", "model"])
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of every file of a report in all formats, by name."""
    folder = hostile_sweep(tmp_path_factory.mktemp("hostile"), MARKUP)
    paths = write_report(read_sweep(folder), list(FORMATS))
    return {path.name: path.read_text() for path in paths if path.suffix in (".md", ".html", ".tex", ".csv", ".svg")}


def test_html_and_svg_hold_no_markup_of_the_sweep(written: dict[str, str]) -> None:
    assert "alert(1)" in written["report.html"]
    for name, text in written.items():
        if name.endswith((".html", ".svg")):
            assert "<script>alert" not in text, name
            assert "</td><script" not in text, name


def test_markdown_holds_no_markup_of_the_sweep(written: dict[str, str]) -> None:
    page = written["report.md"]
    assert "alert(1)" in page
    for syntax in ("<script", "](javascript", "|[a]", "`*_~"):
        assert syntax not in page


def test_latex_runs_no_command_of_the_sweep(written: dict[str, str]) -> None:
    tables = [text for name, text in written.items() if name.endswith(".tex")]
    assert any("etc/passwd" in text for text in tables)
    assert not any(re.search(r"\\input\s*\{", text) for text in tables)


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_field_of_a_csv_file_is_a_formula(formula: str, tmp_path: Path) -> None:
    folder = hostile_sweep(tmp_path / "sweep", formula)
    files = [path for path in write_report(read_sweep(folder), ["csv"]) if path.suffix == ".csv"]
    fields = []
    for path in files:
        with path.open(newline="") as file:
            fields += [field for line in csv.reader(file) for field in line]
    assert any(formula.strip() in field for field in fields)
    for field in fields:
        assert not field.startswith(("=", "+", "@", "\t", "\r")), field
        assert not field.startswith("-") or re.fullmatch(r"-[\d.e+-]+", field), field


def test_what_disturbed_a_point_stands_in_the_report(tmp_path: Path) -> None:
    folder = hostile_sweep(tmp_path / "sweep", "swap in use: 2 MiB")
    write_report(read_sweep(folder), ["md", "html"])
    assert [row["flags"] for row in read_sweep(folder).rows] == ["swap in use: 2 MiB", ""]
    assert "## Disturbed points\n\n- K=2, M=2" in (folder / "report.md").read_text()
    assert "2.00!" in (folder / "report.md").read_text()
    assert "<h3>Disturbed points</h3>" in (folder / "report.html").read_text()


@pytest.mark.parametrize("linked", ["runs", f"runs/{OK}", f"runs/{OK}/result.json"])
def test_no_result_is_read_through_a_link_out_of_the_folder(linked: str, tmp_path: Path) -> None:
    folder, elsewhere = four_points(tmp_path / "sweep"), tmp_path / "elsewhere"
    (folder / linked).rename(elsewhere)
    (folder / linked).symlink_to(elsewhere)
    row = read_sweep(folder).rows[0]
    assert row["status"] == "unreadable"
    assert "is a link, which may lead out of the folder" in row["message"]


def test_a_link_that_stays_in_the_folder_is_none_of_ours_either(tmp_path: Path) -> None:
    folder = four_points(tmp_path / "sweep")
    (folder / "runs" / OK).rename(folder / "moved")
    (folder / "runs" / OK).symlink_to(folder / "moved")
    assert read_sweep(folder).rows[0]["status"] == "unreadable"


def test_a_sweep_json_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = four_points(tmp_path / "sweep")
    (folder / "sweep.json").rename(tmp_path / "elsewhere")
    (folder / "sweep.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResultError, match=r"sweep.json: is a link"):
        read_sweep(folder)


def test_a_sweep_that_is_reached_by_a_link_is_read_and_reported(tmp_path: Path) -> None:
    four_points(tmp_path / "sweep")
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    sweep = read_sweep(tmp_path / "link")
    assert [row["status"] for row in sweep.rows] == ["ok", "wrong", "error", "pending"]
    assert (tmp_path / "sweep" / "report.md") == write_report(sweep, ["md"])[-1].resolve()


def test_an_edited_number_is_a_row_that_says_so_and_an_older_file_without_a_hash_stays_readable(tmp_path: Path) -> None:
    folder = four_points(tmp_path / "sweep")
    path = folder / "runs" / OK / "result.json"
    edited = path.read_text().replace('"step_s":[9.0]', '"step_s":[4.5]')
    path.write_text(edited)
    row = read_sweep(folder).rows[0]
    assert (row["status"], row["step_s"]) == ("unreadable", None)
    assert row["message"].startswith(f"runs/{OK}/result.json: was edited after it was written")
    path.write_text(re.sub(r',"sha256":"[0-9a-f]{64}"', "", edited))
    row = read_sweep(folder).rows[0]
    assert (row["status"], row["step_s"]) == ("ok", 4.5)


def test_no_table_is_written_through_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder, elsewhere = four_points(tmp_path / "sweep"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "tables").symlink_to(elsewhere)
    with pytest.raises(ResultError, match="lead out of the folder"):
        write_report(read_sweep(folder), ["latex"])
    assert list(elsewhere.iterdir()) == []
