"""A picture as a file for papers, and as SVG to stand inside a page, in that page's colours and font."""

import io
import re
from xml.etree import ElementTree

from pipebench.report.figures.canvas import INK, MUTED, PAPER, RULE, Picture

_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)"}
_FAMILY = re.compile(r"font-family: [^;]*(; )?")
_COLOUR = re.compile("|".join(_VARIABLES))
_REFERENCE = re.compile(r"url\(#")
_FINER_THAN_SEEN = re.compile(r"(\.\d\d)\d+")
_GEOMETRY = ("d", "x", "y", "transform")


def rendered(picture: Picture, suffix: str) -> bytes:
    """Return the picture as png, svg or pdf; the same picture gives the same bytes."""
    about = {"Title": picture.title, "Subject" if suffix == "pdf" else "Description": picture.alternative}
    no_date: dict[str, dict[str, str | None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    return _saved(picture, suffix, {**about, **no_date.get(suffix, {})}, background=PAPER)


def _saved(picture: Picture, suffix: str, metadata: dict[str, str | None], background: str) -> bytes:
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": picture.name, "svg.fonttype": "none", "pdf.fonttype": 42}):
        picture.figure.savefig(content, format=suffix, metadata=metadata, facecolor=background)
    return content.getvalue()


def themed_svg(picture: Picture) -> str:
    """Return the picture as an `<svg class="figure">` to stand inline in a page.

    It is as wide as its place, transparent, in the page's font, and follows the page's colours --ink, --muted, --rule
    and --paper. Its ids begin with the picture's name, so several can stand in one page. A reader that cannot see it
    is given title and alternative.
    """
    root = ElementTree.fromstring(_saved(picture, "svg", {"Date": None}, background="none"))
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({name: _at_home(picture.name, name, value) for name, value in attributes.items()})
        element.text, element.tail = _unless_blank(element.text), _unless_blank(element.tail)
    for element in [*root.findall("metadata"), *root.findall("defs")]:
        if element.tag == "metadata" or element.find("style") is not None:  # a style would hold for the whole page
            root.remove(element)
    title, description = f"{picture.name}-title", f"{picture.name}-desc"
    _insert(root, 0, "title", title, picture.title)
    _insert(root, 1, "desc", description, picture.alternative)
    root.attrib = {
        "xmlns": "http://www.w3.org/2000/svg",
        "class": "figure",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-labelledby": f"{title} {description}",
        "style": "stroke-linejoin: round; stroke-linecap: butt",  # what the removed style said
    }
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """Return a name without its namespace: HTML knows svg's, and a link needs none any more."""
    return name.rpartition("}")[2]


def _at_home(prefix: str, name: str, value: str) -> str:
    match name:
        case "id":
            return f"{prefix}-{value}"
        case "href":
            return value.replace("#", f"#{prefix}-", 1)
        case "style":
            value = _COLOUR.sub(lambda found: _VARIABLES[found[0]], value)
            value = _FAMILY.sub("", value)
        case _ if name in _GEOMETRY:
            value = _FINER_THAN_SEEN.sub(r"\1", value).replace("\n", "")
    return _REFERENCE.sub(f"url(#{prefix}-", value)


def _unless_blank(text: str | None) -> str | None:
    return text if text and text.strip() else None


def _insert(root: ElementTree.Element, place: int, tag: str, name: str, text: str) -> None:
    element = ElementTree.Element(tag, id=name)
    element.text = text
    root.insert(place, element)
