"""report.html in a real browser, headless Chromium: filter, sorting, links, timelines, themes, phone, paper, axe."""

import contextlib
import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
from hand_made import OK, config, csv_rows, result, write_sweep
from played import played

from pipebench.record import Repeat
from pipebench.report.sweep import read_sweep
from pipebench.report.write import write_report

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--disable-quic"]  # fmt: skip

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
THEMES = ("light", "dark")
HOSTILE = "</script><img src=x onerror=alert(1)>"
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K=2 and 4 by M=4 and 8 of two schedules, one point disturbed; others wrong, failed, not run, without spans."""
    sizes = [(stages, micro) for stages in (2, 4) for micro in (4, 8)]
    fine = [played(stages=stages, micro=micro, steps=STEPS) for stages, micro in sizes]
    fine += [played(stages=2, micro=4, schedule="zb_v", chunks=2, steps=STEPS)]
    fine[0] = dataclasses.replace(fine[0], flags=["other load: 1 busy thread of others"])
    points = {each.key: each.config for each in fine}
    wrong, failed, pending = (config(stages=stages, micro=16) for stages in (2, 3, 4))
    bare = config(micro=32)
    others = [
        result("a" * 12, wrong, status="wrong", message="gradient error 0.5"),
        result("b" * 12, failed, status="error", message=HOSTILE, repeats=[], rows=[]),
        result("d" * 12, bare, repeats=[_without_spans(result(OK, bare).repeats[0])]),
    ]
    points |= {each.key: each.config for each in others} | {"c" * 12: pending}
    folder = tmp_path_factory.mktemp("sweep")
    write_sweep(folder, points, [*fine, *others], ["stages", "micro", "schedule"])
    write_report(read_sweep(folder))
    return folder


def _without_spans(repeat: Repeat) -> Repeat:
    return dataclasses.replace(repeat, ranks=[dataclasses.replace(rank, spans=[]) for rank in repeat.ranks])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, folder: Path) -> Iterator[Any]:
    with opened(browser, folder) as page:
        yield page


@contextlib.contextmanager
def opened(browser: Any, folder: Path, fragment: str = "", **context: Any) -> Iterator[Any]:
    """Yield the opened page; at its end, nothing must have gone wrong on it and nothing been fetched."""
    address, wrong, fetched = (folder / "report.html").as_uri(), [], []
    with browser.new_context(**{"viewport": DESK, **context}) as surroundings:
        page = surroundings.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url.partition("#")[0]))
        page.goto(address + fragment)
        yield page
    assert wrong == []
    assert set(fetched) == {address}


def shown_keys(page: Any) -> list[str]:
    lines = page.locator("#table-points tbody tr")
    return [line.get_attribute("data-key") for line in lines.all() if line.is_visible()]


def keys_where(folder: Path, **columns: str) -> list[str]:
    return [row["key"] for row in csv_rows(folder) if columns.items() <= row.items()]


def point_of(page: Any, key: str) -> Any:
    point = page.locator(f"#point-{key}")
    point.evaluate("(details) => { details.open = true; }")
    return point


def timeline_of(page: Any, key: str) -> Any:
    """Return the canvas, scrolled to the middle of the screen."""
    canvas = point_of(page, key).locator("canvas")
    canvas.wait_for()
    canvas.evaluate("(canvas) => canvas.scrollIntoView({ block: 'center', behavior: 'instant' })")
    return canvas


def spans_of(folder: Path, key: str) -> tuple[list[list[str]], list[list[list[float]]]]:
    """Return rows and each rank's (start, end, delay) of the median step, straight from the record."""
    record = json.loads((folder / "runs" / key / "result.json").read_text())
    ranks = record["repeats"][0]["ranks"]
    step_s = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    step = step_s.index(median_low(step_s))
    return record["rows"], [rank["spans"][step] for rank in ranks]


def seen(canvas: Any) -> list[float]:
    """Return from when to when the timeline shows, in ms."""
    text = canvas.locator("xpath=..").locator(".range").inner_text()
    return [float(number) for number in re.findall(r"[\d.]+", text)]


def told(page: Any) -> list[str]:
    return [line.inner_text() for line in page.locator(".tip:visible div").all()]


def test_the_filter_hides_points_everywhere_and_counts_them(page: Any, folder: Path) -> None:
    page.locator("#filter input[name=micro][value='4']").check()
    page.locator("#filter input[name=schedule][value=gpipe]").check()
    fitting = keys_where(folder, micro="4", schedule="gpipe")
    assert len(fitting) == 2
    assert shown_keys(page) == fitting
    assert page.locator("#count").inner_text() == f"2 of {len(csv_rows(folder))} points shown"
    for row in csv_rows(folder):
        fits = row["key"] in fitting
        assert page.locator(f"#point-{row['key']}").is_visible() == fits
        for cell in page.locator(f".shaded td[data-key='{row['key']}']").all():
            assert ("dimmed" in (cell.get_attribute("class") or "")) != fits
    page.locator("#filter input[name=micro][value='8']").check()
    assert set(shown_keys(page)) == {*fitting, *keys_where(folder, micro="8", schedule="gpipe")}
    page.get_by_role("button", name="Show all").click()
    api.expect(page.locator("#count")).to_have_text(re.compile(r"^(\d+) of \1 points shown$"))
    assert shown_keys(page) == keys_where(folder)


def test_the_choice_stands_in_the_address(page: Any, folder: Path) -> None:
    page.locator("#filter input[name=status][value=wrong]").check()
    assert page.url.endswith("#status=wrong")
    page.reload()
    assert shown_keys(page) == keys_where(folder, status="wrong")


@pytest.mark.parametrize(
    ("header", "column"), [("samples/s", "samples_per_s"), ("step ms [95 %]", "step_s"), ("bound", "bubble_bound")]
)
def test_the_table_is_sorted_by_the_numbers_of_the_csv(page: Any, folder: Path, header: str, column: str) -> None:
    numbers = {row["key"]: float(row[column]) for row in csv_rows(folder) if row[column]}
    button = page.locator("#table-points thead").get_by_role("button", name=header.replace(" %", "\u00a0%"))
    for direction, sign in (("ascending", 1), ("descending", -1)):
        button.click()
        assert button.locator("xpath=..").get_attribute("aria-sort") == direction
        keys = shown_keys(page)
        found = [numbers[key] for key in keys if key in numbers]
        assert found == sorted(found, key=lambda number: sign * number)
        assert not set(keys[len(found) :]) & set(numbers), "what has no number stands last"


def test_text_is_sorted_as_text(page: Any, folder: Path) -> None:
    page.locator("#table-points thead").get_by_role("button", name="schedule").click()
    schedules = {row["key"]: row["schedule"] for row in csv_rows(folder)}
    assert [schedules[key] for key in shown_keys(page)] == sorted(schedules.values())


def test_a_cell_leads_to_its_point_and_opens_it(page: Any, folder: Path) -> None:
    key = keys_where(folder, stages="4", micro="8", status="ok")[0]
    point = page.locator(f"#point-{key}")
    assert point.get_attribute("open") is None
    page.locator(f".shaded td[data-key='{key}'] a").first.click()
    api.expect(point).to_have_attribute("open", "")
    api.expect(point.locator("summary")).to_be_in_viewport()


def test_an_address_opens_its_point_and_a_strange_one_does_nothing(browser: Any, folder: Path) -> None:
    key = keys_where(folder, status="error")[0]
    with opened(browser, folder, f"#point-{key}") as page:
        api.expect(page.locator(f"#point-{key}")).to_have_attribute("open", "")
        assert HOSTILE in page.locator(f"#point-{key}").inner_text()
    with opened(browser, folder, "#point-%22%5D%3Cimg src=x onerror=alert(1)%3E") as page:
        assert page.locator("details.point[open]").count() == 0
        assert shown_keys(page) == keys_where(folder)


def test_pointing_at_a_box_says_what_ran_when_and_how_long(page: Any, folder: Path) -> None:
    key = keys_where(folder, stages="4", micro="8", status="ok")[0]
    canvas = timeline_of(page, key)
    rows, spans = spans_of(folder, key)
    label, head, gap = page.evaluate("[LABEL, HEAD, LANE_GAP]")
    box, (_, last_ms) = canvas.bounding_box(), seen(canvas)
    words = {"F": "forward", "B": "backward", "O": "optimizer"}
    asked = 0
    for rank, (row, times) in enumerate(zip(rows, spans, strict=True)):
        for action, (start, end, _) in list(zip(row, times, strict=True))[:-1:3]:
            middle = (start + end) / 2 * 1e3 / last_ms
            page.mouse.move(
                box["x"] + label + middle * (box["width"] - label), box["y"] + head + rank * (20 + gap) + 10
            )
            stage, op, micro_batch = re.fullmatch(r"(\d+)(\D)(\d*)", action).groups()
            first, measured, replayed = told(page)
            assert first == f"{words[op]}, stage {stage}, micro-batch {micro_batch}, rank {rank}"
            length, begin = map(float, re.findall(r"[\d.]+", measured))
            assert measured.startswith("measured step: ")
            assert length == pytest.approx((end - start) * 1e3, rel=1e-3)
            assert begin == pytest.approx(start * 1e3, rel=1e-3, abs=1e-3)
            assert replayed.startswith("replayed: ")
            asked += 1
    assert asked > 20
    page.mouse.move(box["x"] + label / 2, box["y"] + 2)
    assert told(page) == []


def test_pointing_between_boxes_says_how_long_a_rank_idles(page: Any, folder: Path) -> None:
    key = keys_where(folder, stages="4", micro="8", status="ok")[0]
    canvas = timeline_of(page, key)
    rows, spans = spans_of(folder, key)
    label, head, gap = page.evaluate("[LABEL, HEAD, LANE_GAP]")
    box, (_, last_ms) = canvas.bounding_box(), seen(canvas)
    first_s = spans[3][0][0]
    page.mouse.move(
        box["x"] + label + first_s / 2 * 1e3 / last_ms * (box["width"] - label), box["y"] + head + 3 * (20 + gap) + 10
    )
    first, second = told(page)
    assert first == "idle, rank 3"
    assert second.endswith(f"from 0 ms, before {rows[3][0]}")
    assert float(re.findall(r"[\d.]+", second)[0]) == pytest.approx(first_s * 1e3, rel=1e-3)


def test_zoom_changes_the_scale_and_dragging_moves_it(page: Any, folder: Path) -> None:
    key = keys_where(folder, stages="2", micro="8", status="ok")[0]
    canvas = timeline_of(page, key)
    whole = seen(canvas)
    point_of(page, key).get_by_role("button", name="Zoom in").click()
    half = seen(canvas)
    assert half[1] - half[0] == pytest.approx(whole[1] / 2, rel=1e-3)
    box = canvas.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + 40
    page.mouse.move(*middle)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    until(lambda: seen(canvas) != half)
    closer = seen(canvas)
    assert closer[1] - closer[0] < (half[1] - half[0]) / 2
    page.mouse.down()
    page.mouse.move(middle[0] - 200, middle[1], steps=4)
    page.mouse.up()
    moved = seen(canvas)
    assert moved[0] > closer[0]
    assert moved[1] - moved[0] == pytest.approx(closer[1] - closer[0], rel=1e-2)
    page.mouse.dblclick(*middle)
    assert seen(canvas) == whole


def until(holds: Callable[[], bool]) -> None:
    """Wait for what takes a moment. (Playwright's own waiting evaluates text, which the page's policy forbids.)"""
    for _ in range(500):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("waited for five seconds")


def test_the_wheel_alone_scrolls_the_page(page: Any, folder: Path) -> None:
    canvas = timeline_of(page, keys_where(folder, stages="2", micro="8", status="ok")[0])
    whole, before = seen(canvas), page.evaluate("scrollY")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 40)
    page.mouse.wheel(0, 120)
    until(lambda: page.evaluate("scrollY") > before)
    assert seen(canvas) == whole


def test_keys_walk_from_action_to_action_and_over_to_the_replay(page: Any, folder: Path) -> None:
    key = keys_where(folder, stages="2", micro="8", status="ok")[0]
    canvas = timeline_of(page, key)
    canvas.focus()
    walked = []
    for name in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(name)
        walked.append(told(page)[0])
    assert walked[0] == "forward, stage 0, micro-batch 0, rank 0"
    assert walked[1] == "forward, stage 0, micro-batch 1, rank 0"
    assert walked[2] == "forward, stage 1, micro-batch 0, rank 1"
    assert walked[3] == walked[2], "there is none before the first"
    assert walked[4].endswith("rank 0")
    whole = seen(canvas)
    page.keyboard.press("+")
    assert seen(canvas)[1] - seen(canvas)[0] == pytest.approx(whole[1] / 2, rel=1e-3)
    page.keyboard.press("0")
    assert seen(canvas) == whole
    page.keyboard.press("Escape")
    assert told(page) == []


def test_touching_a_box_says_what_it_is(browser: Any, folder: Path) -> None:
    with opened(browser, folder, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        canvas = timeline_of(page, keys_where(folder, stages="2", micro="8", status="ok")[0])
        box = canvas.bounding_box()
        page.touchscreen.tap(box["x"] + page.evaluate("LABEL") + 6, box["y"] + page.evaluate("HEAD") + 10)
        assert told(page)[0].startswith("forward, stage 0, micro-batch ")


def test_two_fingers_zoom_a_timeline_and_not_the_page(browser: Any, folder: Path) -> None:
    with opened(browser, folder, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        canvas = timeline_of(page, keys_where(folder, stages="2", micro="8", status="ok")[0])
        whole, box = seen(canvas), canvas.bounding_box()
        touch = page.context.new_cdp_session(page)

        def fingers(kind: str, *places: float) -> None:
            points = [{"x": box["x"] + x, "y": box["y"] + 40, "id": number} for number, x in enumerate(places)]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        fingers("touchStart", 200, 240)
        for apart in (10, 20, 30):
            fingers("touchMove", 200 - apart, 240 + apart)
        fingers("touchEnd")
        pinched = seen(canvas)
        assert pinched[1] - pinched[0] == pytest.approx(whole[1] * 40 / 100, rel=0.05)
        assert page.evaluate("visualViewport.scale") == 1


def test_the_same_action_is_marked_in_both_traces(page: Any, folder: Path) -> None:
    canvas = timeline_of(page, keys_where(folder, stages="2", micro="8", status="ok")[0])
    plain = _pixels(canvas)
    canvas.focus()
    page.keyboard.press("ArrowRight")
    changed = [y for y, (a, b) in enumerate(zip(plain, _pixels(canvas), strict=True)) if a != b]
    assert min(changed) < len(plain) / 2 < max(changed)


def _pixels(canvas: Any) -> list[int]:
    """Return a number for each row of pixels that changes with it."""
    program = """(canvas) => {
      const { width, height } = canvas;
      const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
      context.drawImage(canvas, 0, 0);
      const { data } = context.getImageData(0, 0, width, height);
      return Array.from({ length: height }, (_, y) => {
        let sum = 0;
        for (let i = 4 * width * y; i < 4 * width * (y + 1); i++) sum = (31 * sum + data[i]) % 1000003;
        return sum;
      });
    }"""
    found: list[int] = canvas.evaluate(program)
    return found


def test_a_point_without_spans_or_without_a_result_has_no_timeline(page: Any, folder: Path) -> None:
    for key in ("b" * 12, "c" * 12, "d" * 12):
        assert point_of(page, key).locator("canvas").count() == 0
    assert "records no spans" in point_of(page, "d" * 12).inner_text()


@pytest.mark.parametrize("theme", THEMES)
def test_nothing_scrolls_sideways_on_a_phone(browser: Any, folder: Path, theme: str) -> None:
    with opened(browser, folder, viewport=PHONE, color_scheme=theme) as page:
        open_everything(page)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        page.locator("canvas").first.focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def open_everything(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    api.expect(page.locator("canvas")).to_have_count(page.locator(".timeline").count())


@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_no_violation(browser: Any, folder: Path, theme: str) -> None:
    with opened(browser, folder, color_scheme=theme) as page:
        open_everything(page)
        everything = axe.Axe().run(page)
        assert everything.violations_count == 0, everything.generate_report()
        page.locator("#filter input[name=micro][value='4']").check()
        page.locator("canvas").first.focus()
        page.keyboard.press("ArrowRight")
        filtered = axe.Axe().run(page)
        assert filtered.violations_count == 0, filtered.generate_report()


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Any, folder: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, folder, color_scheme="dark") as page:
        dark = page.evaluate(background)
        canvas = timeline_of(page, keys_where(folder, stages="2", micro="8", status="ok")[0])
        dark_canvas = _pixels(canvas)
        page.get_by_role("button", name="Light theme").click()
        light = page.evaluate(background)
        assert light == "rgb(255, 255, 255)"
        assert dark != light
        assert _pixels(canvas) != dark_canvas
        page.reload()
        assert page.evaluate(background) == light
        page.get_by_role("button", name="Dark theme").click()
        assert page.evaluate(background) == dark


def test_on_paper_everything_stands_open_in_light_colours(browser: Any, folder: Path) -> None:
    with opened(browser, folder, color_scheme="dark") as page:
        until(lambda: page.evaluate("unpacked.size") == page.locator(".timeline").count())
        page.emulate_media(media="print")
        api.expect(page.locator("details:not([open])")).to_have_count(0)
        assert page.locator("canvas").count() == page.locator(".timeline").count() > 4
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator("#filter").is_visible()
        assert not page.locator("#theme").is_visible()
        for region in page.locator(".scroll").all():
            assert region.evaluate("(region) => getComputedStyle(region).overflowX") == "visible"
        page.emulate_media(media="screen")
        api.expect(page.locator("details[open]")).to_have_count(0)
        assert page.locator("#filter").is_visible()


def test_printing_finds_every_timeline_drawn(page: Any) -> None:
    until(lambda: page.evaluate("unpacked.size") == page.locator(".timeline").count())
    assert page.locator("canvas").count() == 0
    assert page.pdf().startswith(b"%PDF")
    assert page.locator("canvas").count() == page.locator(".timeline").count()


def test_without_scripts_the_page_is_complete(browser: Any, folder: Path) -> None:
    with opened(browser, folder, java_script_enabled=False) as page:
        assert not page.locator("#filter").is_visible()
        key = keys_where(folder, stages="2", micro="8", status="ok")[0]
        page.locator(f"#point-{key} summary").first.click()
        point = page.locator(f"#point-{key}")
        assert f"runs/{key}/trace.json" in point.inner_text()
        assert point.locator("table").is_visible()
        assert page.locator("svg.figure").first.is_visible()
