"""report.md: answers at a glance, what failed, tables and pictures, how to read the numbers, what was run and where."""

from collections.abc import Sequence

from pipebench.report.cells import LEGEND, escape
from pipebench.report.content import Content, Point
from pipebench.report.engines import EngineSet
from pipebench.report.figures import Picture
from pipebench.report.glance import Answer
from pipebench.report.table import Table, markdown
from pipebench.report.words import ADVICE_TEXT, BUBBLE_TEXT, ENGINES_TEXT, LEDGER_TEXT, SPEEDUP_TEXT, STAGES_TEXT


def page(content: Content, pictures: Sequence[Picture]) -> str:
    """Return the whole page; the PNGs of `pictures` lie beside it."""
    parts = [
        f"# pipebench: {escape(content.name)}",
        f"{content.counts} Swept: {escape(content.swept)}.",
        *_glance(content.answers),
        *_failures(content.failures),
        *_disturbed(content.disturbed),
        "## Results",
        *(f"![{escape(picture.alternative)}]({picture.name}.png)" for picture in pictures),
        "### All points",
        markdown(content.results),
        *_engines(content.engines),
        *_titled(content.comparisons),
        *_notes(content.notes),
        *_grids(content),
        *_ledger(content),
        f"**Noise floor.** {escape(content.noise)}",
        "**Marks.** " + "; ".join(f"`{mark}` {escape(meaning)}" for mark, meaning in LEGEND.items()) + ".",
        "## How to read the bubble",
        BUBBLE_TEXT,
        *_references(content),
        "## What ran, and where",
        markdown(content.setting),
        *_stages(content),
    ]
    return "\n\n".join(parts) + "\n"


def _glance(answers: Sequence[Answer]) -> list[str]:
    lines = [f"- **{answer.question}:** {escape(answer.answer)}. {escape(answer.because)}" for answer in answers]
    return ["## At a glance", "\n".join(lines)] if lines else []


def _failures(points: Sequence[Point]) -> list[str]:
    """Say which points are no results, and why, before any number is shown."""
    lines = [
        f"- **{point.row['status']}** {escape(point.name)}: {escape(point.row['message'] or 'not run yet')}"
        for point in points
    ]
    return ["## Points without a result", "\n".join(lines)] if lines else []


def _disturbed(points: Sequence[Point]) -> list[str]:
    lines = [f"- {escape(point.name)}: {escape(point.row['flags'])}" for point in points]
    return ["## Disturbed points", "\n".join(lines)] if lines else []


def _titled(tables: Sequence[Table]) -> list[str]:
    return [part for table in tables for part in (f"### {escape(table.title)}", markdown(table))]


def _engines(sets: Sequence[EngineSet]) -> list[str]:
    if not sets:
        return []
    words = "\n".join(f"- {escape(each.words)}" for each in sets)
    return ["### Engines side by side", ENGINES_TEXT, words, *_titled([each.table for each in sets])]


def _notes(points: Sequence[Point]) -> list[str]:
    lines = [f"- {escape(point.name)}: {escape(point.row['message'])}" for point in points]
    return ["\n".join(lines)] if lines else []


def _grids(content: Content) -> list[str]:
    parts = []
    for title, tables in content.grids.items():
        parts += [f"### {escape(title)}"] if title else []
        parts += [part for table in tables for part in (f"**{table.title}**", markdown(table))]
    return parts


def _ledger(content: Content) -> list[str]:
    if content.ledger is None:
        return []
    words = [f"- {escape(point.name)}: {escape(point.lost)}" for point in content.points if point.lost]
    return ["## Where the time went", LEDGER_TEXT, markdown(content.ledger), ADVICE_TEXT, "\n".join(words)]


def _references(content: Content) -> list[str]:
    """Say what each speed-up is measured against."""
    if content.references is None:
        return ["## One device", f"{SPEEDUP_TEXT} No such run has finished yet."]
    return ["## One device", SPEEDUP_TEXT, markdown(content.references)]


def _stages(content: Content) -> list[str]:
    """Return a collapsed table for every measured point: where the time and the memory of each stage went."""
    parts = []
    for point in content.points:
        if point.stages:
            summary = escape(f"{point.name} ({point.summary})")
            parts.append(f"<details><summary>{summary}</summary>\n\n{markdown(point.stages)}\n\n</details>")
    return ["## Stages of every point", STAGES_TEXT, *parts] if parts else []
