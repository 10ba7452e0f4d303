"""A table as LaTeX for a paper: booktabs, as large as fits the width of the text, in plain ASCII for any engine.

A table too wide for the text at normal size is set smaller, and scaled down only where that is not enough; one with
more lines than a page holds becomes several. Text columns with long cells break their lines.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from pipebench.report.table import Cell, Table

LINES_A_PAGE = 40
"""Lines of a table that fit a page with its caption."""

_LETTERS_A_LINE = {"": 62, r"\small": 70, r"\footnotesize": 78}
"""Letters that fit the width of an article's text (345 pt), by the command that makes them smaller."""

_COLUMN_GAP = 2.4
"""Letters that the space between two columns (12 pt) takes."""

_SCALED = r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"
"""Begins what is made as narrow as the text, but never wider than it is."""

_CLOSER = r"\setlength{\tabcolsep}{3pt}"
"""Halves the space between columns before letters are made smaller."""

_LONG_CELL = 60
"""Letters above which a cell's lines are broken."""

_BROKEN = 0.6
"""Share of the text's width that columns with broken lines take."""


def latex(table: Table) -> str:
    """Return the table with caption and label (`tab:NAME`; of several parts the first has it), below what it needs."""
    parts = [table.lines[first : first + LINES_A_PAGE] for first in range(0, len(table.lines), LINES_A_PAGE)] or [()]
    packages = ["booktabs", *(["array"] if _long_columns(table) else []), *(["graphicx"] if _too_wide(table) else [])]
    lines = [rf"% \usepackage{{{', '.join(packages)}}}"]
    for number, part in enumerate(parts, start=1):
        caption = latex_text(table.title) + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
        lines += [r"\begin{table}", r"  \centering", rf"  \caption{{{caption}}}"]
        lines += [rf"  \label{{tab:{table.name}}}"] if number == 1 else []
        lines += [f"  {line}" for line in _fitted(table, part)]
        lines += [r"\end{table}"]
    return "\n".join(lines) + "\n"


def _fitted(table: Table, lines: Sequence[tuple[Cell, ...]]) -> list[str]:
    """Return these lines of the table as a tabular, with what makes it fit the width of the text."""
    tabular = [
        rf"\begin{{tabular}}{{{_columns(table)}}}",
        r"  \toprule",
        f"  {_line(table.header)}",
        r"  \midrule",
        *(f"  {_line([cell.text for cell in line])}" for line in lines),
        r"  \bottomrule",
        r"\end{tabular}",
    ]
    if _too_wide(table):
        return [_CLOSER, _SCALED, *(f"  {line}" for line in tabular[:-1]), rf"  {tabular[-1]}%", "}"]
    size = next(size for size, room in _LETTERS_A_LINE.items() if _letters(table) <= room)
    return [size, *tabular] if size else tabular


def _line(texts: Iterable[str]) -> str:
    return " & ".join(map(latex_text, texts)) + r" \\"


def _too_wide(table: Table) -> bool:
    """Tell whether the table has to be scaled, since no size of letters makes it fit."""
    return _letters(table) > max(_LETTERS_A_LINE.values())


def _letters(table: Table) -> float:
    """Return the letters that a line of the table has room for."""
    long = _long_columns(table)
    whole = sum(width for column, width in enumerate(_widths(table)) if column not in long)
    return whole + len(table.header) * _COLUMN_GAP + (_BROKEN * _LETTERS_A_LINE[""] if long else 0)


def _widths(table: Table) -> list[int]:
    """Return the letters of the longest cell of each column."""
    lines = [table.header, *([cell.text for cell in line] for line in table.lines)]
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _long_columns(table: Table) -> list[int]:
    """Return the text columns whose lines are to be broken."""
    return [column for column, width in enumerate(_widths(table)[: table.num_text_columns]) if width > _LONG_CELL]


def _columns(table: Table) -> str:
    long = _long_columns(table)
    kinds = ["l" if column < table.num_text_columns else "r" for column in range(len(table.header))]
    for column in long:
        kinds[column] = rf">{{\raggedright\arraybackslash}}p{{{_BROKEN / len(long):.2g}\textwidth}}"
    return "".join(kinds)


_NO_LIGATURE = "\N{ZERO WIDTH NON-JOINER}"
_HYPHEN_BEFORE_HYPHEN = re.compile("-(?=-)")
"""Two of them would become a dash."""

_COMMANDS = (
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"$\sim$", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", '"': r"{\char34}", "`": r"{\char96}", "'": r"{\char39}"}
    | {_NO_LIGATURE: "{}", "[": "{[}", "]": "{]}"}  # after a line break, [ would begin its argument
    | {"\N{EN DASH}": "--", "\N{EM DASH}": "---", "\N{HORIZONTAL ELLIPSIS}": r"\dots{}"}
    | {"\N{MULTIPLICATION SIGN}": r"$\times$", "\N{PLUS-MINUS SIGN}": r"$\pm$", "\N{MIDDLE DOT}": r"$\cdot$"}
    | {"\N{GREATER-THAN OR EQUAL TO}": r"$\geq$", "\N{LESS-THAN OR EQUAL TO}": r"$\leq$", "\N{MINUS SIGN}": "$-$"}
    | {"\N{ALMOST EQUAL TO}": r"$\approx$", "\N{RIGHTWARDS ARROW}": r"$\to$", "\N{DEGREE SIGN}": r"$^\circ$"}
    | {"\N{MICRO SIGN}": r"$\mu$", "\N{GREEK SMALL LETTER MU}": r"$\mu$", "\N{LATIN SMALL LETTER SHARP S}": r"\ss{}"}
    | {"\N{LATIN SMALL LETTER AE}": r"\ae{}", "\N{LATIN CAPITAL LETTER AE}": r"\AE{}"}
    | {"\N{LATIN SMALL LETTER O WITH STROKE}": r"\o{}", "\N{LATIN CAPITAL LETTER O WITH STROKE}": r"\O{}"}
)
"""What stands for a character that is syntax, or that is not ASCII."""

_ACCENTS = {
    "\N{COMBINING GRAVE ACCENT}": "`",
    "\N{COMBINING ACUTE ACCENT}": "'",
    "\N{COMBINING CIRCUMFLEX ACCENT}": "^",
    "\N{COMBINING TILDE}": "~",
    "\N{COMBINING DIAERESIS}": '"',
    "\N{COMBINING RING ABOVE}": "r",
    "\N{COMBINING CARON}": "v",
    "\N{COMBINING CEDILLA}": "c",
}


def latex_text(text: str) -> str:
    """Return text that LaTeX shows as it is, on one line.

    What LaTeX has no command for, such as an emoji, stands as its code point: `[U+1F680]`.
    """
    apart = _HYPHEN_BEFORE_HYPHEN.sub(f"-{_NO_LIGATURE}", " ".join(text.split()))
    return "".join(map(_shown, apart))


def _shown(character: str) -> str:
    if character in _COMMANDS:
        return _COMMANDS[character]
    if character.isascii() and character.isprintable():
        return character
    parts = unicodedata.normalize("NFD", character)
    letter, accent = parts[0], parts[1:]
    if letter.isascii() and letter.isalpha() and accent in _ACCENTS:
        return f"\\{_ACCENTS[accent]}{{{letter}}}"
    return f"{{[}}U+{ord(character):04X}{{]}}"
