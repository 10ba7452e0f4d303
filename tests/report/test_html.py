"""report.html without a browser: numbers are the CSV's, no point is a hole, nothing is fetched, text stays text."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hand_made import ERROR, OK, PENDING, WRONG, config, csv_rows, rank_record, result, write_sweep
from played import sixty_points

from pipebench.record import Failure, Repeat
from pipebench.report.cells import bubble, digits, fraction, mebibytes, milliseconds
from pipebench.report.html import shades, terms
from pipebench.report.sweep import read_sweep
from pipebench.report.table import Cell, Table
from pipebench.report.write import write_report

VOID = {"meta", "input", "br", "img", "link", "hr"}

Attributes = dict[str, str | None]


@dataclass
class Element:
    """An element of the page, with its text and what it holds."""

    tag: str
    attributes: Attributes
    children: list["Element"] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())

    def all(self, tag: str, **attributes: str) -> list["Element"]:
        """Return the elements of that tag inside, whose attributes (`_` for `-`) are these."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        found = [child for child in self.children if child.tag == tag and wanted.items() <= child.attributes.items()]
        return found + [deeper for child in self.children for deeper in child.all(tag, **attributes)]

    def everything(self) -> list["Element"]:
        return [self, *(deeper for child in self.children for deeper in child.everything())]

    def one(self, tag: str, **attributes: str) -> "Element":
        [found] = self.all(tag, **attributes)
        return found


class Page(HTMLParser):
    """Builds the tree; an element that is closed out of order fails the test."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(text)
        assert len(self.open) == 1, f"never closed: {[each.tag for each in self.open[1:]]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.pieces.append(data)


def parsed(folder: Path) -> Element:
    return Page((folder / "report.html").read_text()).root


@pytest.fixture(scope="module")
def page(reported: Path) -> Element:
    return parsed(reported)


def cells_of(page: Element, table: str) -> dict[str, list[Element]]:
    """Return the cells of each line of a table, by its point's key."""
    body = page.one("table", id=f"table-{table}").one("tbody")
    return {str(line.attributes["data-key"]): line.children for line in body.all("tr")}


def header_of(page: Element, table: str) -> list[str]:
    return [
        cell.text.replace("\N{NO-BREAK SPACE}", " ")
        for cell in page.one("table", id=f"table-{table}").all("th", scope="col")
    ]


def test_the_table_of_all_points_holds_the_numbers_of_the_csv(reported: Path, page: Element) -> None:
    columns = {
        "samples/s": ("samples_per_s", digits),
        "speed-up": ("speedup", digits),
        "bubble measured": ("bubble_fraction", fraction),
        "replayed": ("bubble_replayed", fraction),
        "bound": ("bubble_bound", fraction),
        "peak MiB": ("peak_memory_bytes", mebibytes),
    }
    lines, header = cells_of(page, "points"), header_of(page, "points")
    assert set(columns) < set(header)
    for row in csv_rows(reported):
        line = lines[row["key"]]
        for name, (column, shown) in columns.items():
            cell = line[header.index(name)]
            value = float(row[column]) if row[column] else None
            assert cell.text == shown(value)
            assert cell.attributes.get("data-value") == (row[column] or None)
        step = line[header.index("step ms [95 %]")]
        assert step.attributes.get("data-value") == (row["step_s"] or None)
        if row["step_s"]:
            times = [milliseconds(float(row[name])) for name in ("step_s", "step_ci_low_s", "step_ci_high_s")]
            assert step.text == "{} [{}, {}]".format(*times)


def test_the_tables_k_by_m_hold_the_numbers_of_the_csv_and_lead_to_their_points(reported: Path, page: Element) -> None:
    row = csv_rows(reported)[0]
    row_of_numbers: dict[str, Any] = {name: float(row[name]) for name in row if name.startswith("bubble") and row[name]}
    shown = {
        "samples-1": digits(float(row["samples_per_s"])),
        "speedup-1": digits(float(row["speedup"])),
        "bubble-1": bubble(row_of_numbers, " / "),
        "memory-1": mebibytes(float(row["peak_memory_bytes"])),
    }
    for name, text in shown.items():
        cell = page.one("table", id=f"table-{name}").one("td", data_key=OK)
        assert cell.text == text
        assert cell.one("a").attributes["href"] == f"#point-{OK}"
    assert [each.attributes["id"] for each in page.all("details", class_="point")] == [
        f"point-{key}" for key in (OK, WRONG, ERROR, PENDING)
    ]


def test_the_ledger_holds_the_numbers_of_the_csv(reported: Path, page: Element) -> None:
    row = csv_rows(reported)[0]
    [(key, line)] = cells_of(page, "ledger").items()
    assert key == OK
    parts = [row[name] for name in row if name.startswith("ledger_")]
    assert [cell.attributes["data-value"] for cell in line[-1 - len(parts) :]] == [row["step_s"], *parts]


def test_points_without_a_result_are_named_with_their_message_and_stand_in_every_table(page: Element) -> None:
    [failures] = page.all("ul", class_="failures")
    assert [(each.one("strong").text, each.one("span").text) for each in failures.all("li")] == [
        ("wrong", "gradient error 0.5: expected at most 0.0001 in fp32"),
        ("error", "rank 1 failed at 1F0: a | b <script> second line"),
        ("pending", "not run yet"),
    ]
    for key, status in ((WRONG, "wrong"), (ERROR, "error"), (PENDING, "pending")):
        in_grids = [cell for table in page.all("table", class_="shaded") for cell in table.all("td", data_key=key)]
        assert in_grids
        assert {cell.text for cell in in_grids} == {status}
        assert {cell.attributes["data-status"] for cell in in_grids} == {status}
        assert status in [cell.text for cell in cells_of(page, "points")[key]]
        assert page.one("details", id=f"point-{key}")


def test_a_point_tells_its_numbers_its_losses_and_its_stages(page: Element) -> None:
    point = page.one("details", id=f"point-{OK}")
    assert point.one("h3").text == "K=2, M=2, schedule=gpipe"
    assert "3000.0 ms of 9000.0 ms beyond forward and backward: 3000.0 fill and drain." in point.text
    assert "makespan 9000 ms, bubble 0.333" in str(point.one("div", class_="timeline").attributes["data-alternative"])
    assert f"runs/{OK}/trace.json" in point.text
    assert [line.children[3].text for line in point.one("tbody").all("tr")] == ["1000", "1000"]


def test_what_the_answers_say_leads_to_their_points(page: Element) -> None:
    answers = {each.one("h3").text: each for each in page.all("article")}
    assert answers["Fastest"].one("p", class_="answer").text == "2.00 samples/s, 1.33 times one device"
    assert answers["Fastest"].one("a").attributes["href"] == f"#point-{OK}"


def test_every_swept_key_can_be_chosen_by_its_values(page: Element) -> None:
    chosen = {
        group.one("legend").text: [box.attributes["value"] for box in group.all("input")]
        for group in page.all("fieldset")
    }
    assert chosen == {
        "stages": ["2", "3"],
        "micro": ["2", "4", "8"],
        "schedule": ["gpipe", "1f1b"],
        "status": ["ok", "wrong", "error", "pending"],
    }


def test_tables_are_real_tables_and_pictures_have_a_text_alternative(reported: Path, page: Element) -> None:
    for table in page.all("table"):
        assert table.one("caption").text
        width = len(table.one("thead").one("tr").children)
        for line in table.one("tbody").all("tr"):
            assert len(line.children) == width
            assert line.children[0].attributes["scope"] == "row"
    figures = page.all("svg", class_="figure")
    assert len(figures) == len(list(reported.glob("*.png"))) > 0
    for figure in figures:
        assert figure.attributes["role"] == "img"
        title, description = str(figure.attributes["aria-labelledby"]).split()
        assert figure.one("title", id=title).text
        assert figure.one("desc", id=description).text


def test_every_column_that_can_be_sorted_has_a_name(tmp_path: Path) -> None:
    points = {OK: config()}
    write_sweep(tmp_path, points, [result(OK, points[OK], flags=["other load: 1 busy thread of others"])], ["stages"])
    write_report(read_sweep(tmp_path), ["html"])
    page = parsed(tmp_path)
    tables = [table for table in page.all("table") if "data-sortable" in table.attributes]
    assert [table.attributes["id"] for table in tables] == ["table-points", "table-ledger"]
    assert "marks" in header_of(page, "ledger")
    for table in tables:
        assert all(cell.tag == "th" and cell.text for cell in table.one("thead").one("tr").children)


def test_no_two_elements_have_the_same_id_and_every_link_leads_somewhere(page: Element) -> None:
    ids = [element.attributes["id"] for element in page.everything() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    links = {str(link.attributes["href"]) for link in page.all("a")}
    assert {link.removeprefix("#") for link in links} <= set(map(str, ids))
    assert all(link.startswith("#") for link in links)


def test_the_page_fetches_nothing(reported: Path, page: Element) -> None:
    text = (reported / "report.html").read_text()
    assert not page.all("link")
    assert "@import" not in text
    for element in page.everything():
        for name in {"src", "srcset", "href", "xlink:href", "action", "data", "poster"} & set(element.attributes):
            assert str(element.attributes[name]).startswith("#")
    assert not re.findall(r"url\((?!#)", text)
    policy = page.one("meta", http_equiv="Content-Security-Policy").attributes["content"]
    assert str(policy).startswith("default-src 'none';")
    assert "unsafe" not in str(policy).partition("script-src")[2]


HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}\"'&<b>"


def test_text_of_a_sweep_never_becomes_markup(tmp_path: Path) -> None:
    points = {OK: config(), ERROR: config(micro=4, schedule=f"{HOSTILE}.csv")}
    failure = Failure(1, 1, "1F0", HOSTILE, [HOSTILE, "last words"], [f"rank 0: {HOSTILE}"])
    results = [
        result(OK, points[OK], environment={"git": HOSTILE, HOSTILE: "x"}),
        result(ERROR, points[ERROR], status="error", message=HOSTILE, repeats=[], rows=[], failure=failure),
    ]
    write_sweep(tmp_path, points, results, ["micro", "schedule"])
    state = json.loads((tmp_path / "sweep.json").read_text())
    (tmp_path / "sweep.json").write_text(json.dumps({**state, "name": HOSTILE}))
    write_report(read_sweep(tmp_path), ["html"])
    page = parsed(tmp_path)
    assert not page.all("img")
    assert not page.all("b")
    assert len(page.all("script")) == 3
    assert page.one("h1").text == f"pipebench: {HOSTILE}"
    assert HOSTILE in page.one("ul", class_="failures").text
    told = page.one("details", id=f"point-{ERROR}").text
    assert f"Last printed by rank 1:{HOSTILE} last words" in told  # the parser folds white space
    assert f"rank 0: {HOSTILE}" in told
    assert HOSTILE in page.one("table", id="table-setting").text
    assert [box.attributes["value"] for box in page.all("input", name="schedule")] == ["gpipe", f"{HOSTILE}.csv"]
    data = json.loads("".join(page.one("script", id="data").pieces))
    assert data["points"][ERROR]["schedule"] == f"{HOSTILE}.csv"


def test_sixty_points_of_8_stages_and_32_micro_batches_take_less_than_two_megabytes(tmp_path: Path) -> None:
    write_report(read_sweep(sixty_points(tmp_path)), ["html"])
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    page = parsed(tmp_path)
    assert len(page.all("div", class_="timeline")) == 60
    assert len(json.loads("".join(page.one("script", id="data").pieces))["timelines"]) == 60


def test_a_timeline_that_is_too_large_is_named_in_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipebench.report.timeline.MOST_BYTES", 10)
    write_report(read_sweep(folder), ["html"])
    page = parsed(folder)
    assert not page.all("div", class_="timeline")
    told = page.one("details", id=f"point-{OK}").one("p", class_="fallback").text
    assert "too large for this page" in told
    assert f"runs/{OK}/trace.json" in told


def test_an_engine_without_spans_says_that_there_is_no_timeline(tmp_path: Path) -> None:
    ranks = [dataclasses.replace(rank_record(rank, [], 9.0), spans=[]) for rank in range(2)]
    point = config(engine="torch")
    write_sweep(tmp_path, {OK: point}, [result(OK, point, repeats=[Repeat(ranks, wall_s=9.0)])], ["stages"])
    write_report(read_sweep(tmp_path), ["html"])
    assert "No timeline: this engine records no spans." in parsed(tmp_path).one("details", id=f"point-{OK}").text


def test_a_sweep_without_any_result_has_a_page(tmp_path: Path) -> None:
    write_sweep(tmp_path, {PENDING: config()}, [], ["stages"])
    write_report(read_sweep(tmp_path), ["html"])
    page = parsed(tmp_path)
    assert "No point is a result yet." in page.text
    assert "not run yet" in page.text
    assert not page.all("form")


def test_cells_are_shaded_from_the_lowest_number_to_the_highest() -> None:
    lines = ((Cell("K=2"), Cell("a", 1.0), Cell("b", 2.0), Cell("c", 5.0), Cell("error", status="error")),)
    shade = shades(Table("t", "t", ("",) * 5, lines, shade=(1.0, 5.0)))
    assert [shade(cell.value) for cell in lines[0][1:]] == ["0%", "25%", "100%", "0%"]
    alone = shades(Table("t", "t", ("", ""), ((Cell("K=2"), Cell("a", 1.0)),), shade=(1.0, 1.0)))
    assert [alone(1.0), alone(float("nan"))] == ["50%", "0%"]


def test_terms_are_marked_and_all_else_is_text() -> None:
    assert terms("a **b < c** & d") == "a <strong>b &lt; c</strong> &amp; d"
