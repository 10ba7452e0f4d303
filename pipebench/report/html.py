"""report.html: the whole report as one file that fetches nothing, for a screen, a phone, and paper.

The template in `web/` lays it out, complete without JavaScript; its scripts add sorting, filtering and timelines. Text
of a sweep may hold anything: the template escapes all of it, data for the scripts is JSON that cannot end their
element, and the page's own policy lets no script run but these.
"""

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from pipebench.grid import K, M, varying
from pipebench.render import WORDS
from pipebench.report import words
from pipebench.report.cells import LEGEND, marks
from pipebench.report.content import Content
from pipebench.report.figures import Picture, themed_svg
from pipebench.report.table import Table
from pipebench.report.timeline import packed
from pipebench.rows import COMPARABLE, MEASURED, Row

SCRIPTS = ("timeline.js", "report.js")


@dataclass(frozen=True, slots=True)
class Filter:
    """A key that points can be chosen by, and the values that it takes among them."""

    name: str
    values: tuple[str, ...]


def html_page(content: Content, pictures: Sequence[Picture]) -> str:
    """Return the page; timelines too large for it are named in their place."""
    timelines = packed({point.key: point.timeline for point in content.points if point.timeline})
    scripts = [_part(name) for name in SCRIPTS]
    return _template().render(
        content=content,
        names={point.key: point.name for point in content.points},
        pictures=[(picture, Markup(themed_svg(picture))) for picture in pictures],
        filters=filters(content.rows),
        timelines=set(timelines),
        data=data(content.rows, timelines),
        style=Markup(_part("report.css")),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        words=words,
        legend=LEGEND,
        measured=MEASURED,
        comparable=COMPARABLE,
    )


def filters(rows: Sequence[Row]) -> list[Filter]:
    """Return the keys in which points differ, K and M first, and their status."""
    found = [Filter(name, _distinct(row[name] for row in rows)) for name in (K, M, *varying(rows), "status")]
    return [each for each in found if len(each.values) > 1]


def data(rows: Sequence[Row], timelines: dict[str, str]) -> dict[str, Any]:
    """Return what the scripts read: each point's values of the filters, the words for ops, and the timelines."""
    names = [each.name for each in filters(rows)]
    points = {row["key"]: {name: str(row[name]) for name in names} for row in rows}
    return {"points": points, "words": {str(op): word for op, word in WORDS.items()}, "timelines": timelines}


def shades(table: Table) -> Callable[[float | None], str]:
    """Return how deep a cell is coloured: from 0 % at the low end of the table's scale to 100 % at its high end."""
    low, high = table.shade or (0.0, 0.0)

    def shade(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return "0%"
        return f"{(value - low) / (high - low):.0%}" if high > low else "50%"

    return shade


def terms(text: str) -> Markup:
    """Return text whose `**` pairs mark terms (`report.words`) as markup."""
    term = Markup("<strong>{}</strong>")
    pieces = (term.format(piece) if place % 2 else escape(piece) for place, piece in enumerate(text.split("**")))
    return Markup("").join(pieces)


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("pipebench.report", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"terms": terms, "shades": shades, "marks": marks}
    return environment.get_template("report.html.j2")


def _part(name: str) -> str:
    return (files("pipebench.report") / "web" / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy: nothing is fetched, and only our scripts run, by their hash."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _distinct(found: Iterable[Any]) -> tuple[str, ...]:
    """Return the distinct values as text: numbers in rising order, others as met."""
    values = list(dict.fromkeys(found))
    if all(isinstance(value, int | float) for value in values):
        values.sort()
    return tuple(map(str, values))
