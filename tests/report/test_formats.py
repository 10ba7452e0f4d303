"""Formats for papers: every table as LaTeX and CSV, every figure as SVG and PDF, and what LaTeX cannot show."""

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hand_made import OK, PICTURES, config, result, write_sweep

from pipebench.report.__main__ import main
from pipebench.report.cells import NOTHING
from pipebench.report.content import Content, content_of
from pipebench.report.latex import LINES_A_PAGE, latex, latex_text
from pipebench.report.sweep import read_sweep
from pipebench.report.table import Table, cells, csv_of
from pipebench.report.write import FORMATS, write_report


@pytest.fixture(scope="module")
def content(reported: Path) -> Content:
    return content_of(read_sweep(reported))


def table(header: tuple[str, ...], *lines: tuple[str, ...], num_text_columns: int = 1) -> Table:
    return Table("name", "Title", header, tuple(cells(line) for line in lines), num_text_columns)


def test_every_table_is_a_csv_file(folder: Path, content: Content) -> None:
    written = {path.name for path in write_report(read_sweep(folder), ["csv"])}
    assert written == {"results.csv", *(f"{table.name}.csv" for table in content.tables)}
    for shown in content.tables:
        with (folder / "tables" / f"{shown.name}.csv").open(newline="") as file:
            header, *lines = csv.reader(file)
        assert len(lines) == len(shown.lines)
        assert len(header) >= len(shown.header)
        assert not any(NOTHING in cell or "~" in cell or " / " in cell for line in lines for cell in line)


def test_a_csv_table_has_every_number_in_a_column_of_its_own() -> None:
    made = table(
        ("schedule", "step ms [95 %]", "bubble (measured / replayed / bound)", "MiB"),
        ("gpipe~", "9.00 [8.50, 9.50]", f"0.4 / 0.3 / {NOTHING}", "12.5*~ simulated"),
        ("1f1b", "error", "error", NOTHING),
    )
    assert csv_of(made).splitlines() == [
        "schedule,step ms,step ms low,step ms high,bubble measured,bubble replayed,bubble bound,MiB",
        "gpipe~,9.00,8.50,9.50,0.4,0.3,,12.5",
        "1f1b,error,,,error,,,",
    ]


def test_every_table_is_a_latex_file_with_its_caption_label_and_lines(folder: Path, content: Content) -> None:
    written = {path.name for path in write_report(read_sweep(folder), ["latex"])}
    assert written == {"results.csv", *(f"{table.name}.tex" for table in content.tables)}
    for shown in content.tables:
        text = (folder / "tables" / f"{shown.name}.tex").read_text()
        assert text.isascii()
        assert rf"\caption{{{latex_text(shown.title)}}}" in text
        assert rf"\label{{tab:{shown.name}}}" in text
        assert text.count(r" \\") == 1 + len(shown.lines)
        for line in shown.lines:
            assert " & ".join(latex_text(cell.text) for cell in line) in text


def test_figures_come_in_the_formats_asked_for(folder: Path) -> None:
    written = [path.name for path in write_report(read_sweep(folder), ["svg", "pdf"])]
    assert written == ["results.csv", *(f"{name}.{suffix}" for suffix in ("svg", "pdf") for name in PICTURES)]


def test_tables_of_a_big_grid_have_names_of_their_own(tmp_path: Path) -> None:
    grid = [(m, schedule, r) for m in (1, 2) for schedule in ("gpipe", "1f1b", "naive") for r in ("never", "always")]
    points = {
        f"{number:012x}": config(micro=micro, schedule=schedule, recompute=recompute)
        for number, (micro, schedule, recompute) in enumerate(grid)
    }
    results = [result(key, point) for key, point in points.items()]
    write_sweep(tmp_path, points, results, ["micro", "schedule", "recompute"])
    tables = content_of(read_sweep(tmp_path)).tables
    names = [table.name for table in tables]
    assert len(names) > 4 * 6  # K by M tables for each schedule and recompute setting, and stages of each point
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


@pytest.mark.parametrize(
    ("formats", "said"),
    [("pgn", "'pgn': expected some of md, "), ("md,", "'': expected"), ("md png", "'md png': expected")],
)
def test_an_unknown_format_is_one_line_and_exit_code_2(
    folder: Path, formats: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), "--format", formats]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ConfigError: --format={formats}: {said}")
    assert error.count("\n") == 1
    assert not (folder / "results.csv").exists()


def test_formats_may_be_separated_by_commas_and_blanks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--format", "md, csv"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [str(folder / "results.csv"), str(folder / "report.md")]
    assert (folder / "tables" / f"stages-{OK}.csv").exists()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("50 % of a_b & c#d {e} $f$", r"50 \% of a\_b \& c\#d \{e\} \$f\$"),
        ("a\\b ^ | < >", r"a\textbackslash{}b \textasciicircum{} \textbar{} \textless{} \textgreater{}"),
        ("1.50*~", r"1.50*$\sim$"),
        ("[1, 2]", "{[}1, 2{]}"),
        ("--flag ---", "-{}-flag -{}-{}-"),
        ("'a' \"b\" ?`", r"{\char39}a{\char39} {\char34}b{\char34} ?{\char96}"),
        (
            "\N{EN DASH} 2 \N{MULTIPLICATION SIGN} 3 ± 4 ≥ 5 ≤ 6 → µ",
            r"-- 2 $\times$ 3 $\pm$ 4 $\geq$ 5 $\leq$ 6 $\to$ $\mu$",
        ),
        ("Müller, Šárka, façade, Ångström, ß", r"M\"{u}ller, \v{S}\'{a}rka, fa\c{c}ade, \r{A}ngstr\"{o}m, \ss{}"),
        ("go 🚀 漢", "go {[}U+1F680{]} {[}U+6F22{]}"),
        ("a\nb\tc\x07", "a b c{[}U+0007{]}"),
    ],
)
def test_latex_shows_text_as_it_is(text: str, shown: str) -> None:
    assert latex_text(text) == shown


def test_a_table_that_fits_is_set_at_normal_size_with_booktabs_alone() -> None:
    assert latex(table(("", "M=4"), ("K=2", "1.5"))).splitlines() == [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        r"  \caption{Title}",
        r"  \label{tab:name}",
        r"  \begin{tabular}{lr}",
        r"    \toprule",
        r"     & M=4 \\",
        r"    \midrule",
        r"    K=2 & 1.5 \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]


def test_a_wide_table_is_set_smaller_and_a_very_wide_one_is_scaled() -> None:
    eleven = "12345678901"
    assert "\n  \\small\n" in latex(table((eleven,) * 5, (eleven,) * 5))
    scaled = latex(table((eleven,) * 9, (eleven,) * 9))
    assert r"\resizebox{\ifdim\width>\textwidth" in scaled
    assert scaled.startswith("% \\usepackage{booktabs, graphicx}\n")


def test_long_cells_of_text_columns_break_their_lines() -> None:
    text = latex(table(("setting", "value"), ("model", "word " * 20), ("steps", "3"), num_text_columns=2))
    assert r"\begin{tabular}{l>{\raggedright\arraybackslash}p{0.6\textwidth}}" in text
    assert text.startswith("% \\usepackage{booktabs, array}\n")
    assert "resizebox" not in text


def test_a_table_longer_than_a_page_comes_in_parts() -> None:
    text = latex(table(("point", "step"), *((f"K={k}", "1") for k in range(2 * LINES_A_PAGE + 1))))
    assert re.findall(r"\\caption\{(.*)\}", text) == ["Title (1 of 3)", "Title (2 of 3)", "Title (3 of 3)"]
    assert text.count(r"\label") == 1
    assert text.count(r"point & step \\") == 3
    assert re.findall(r"K=\d+", text) == [f"K={k}" for k in range(2 * LINES_A_PAGE + 1)]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs a LaTeX: pdflatex is not installed")
def test_a_real_latex_takes_every_table(folder: Path, tmp_path: Path) -> None:
    every_character = "".join(map(chr, (*range(1, 0x180), *range(0x2010, 0x2300), 0x1F680)))
    odd = table(("[a]", every_character), ("[b]", every_character), (every_character * 3, "x"), num_text_columns=2)
    paths = [path for path in write_report(read_sweep(folder), ["latex"]) if path.suffix == ".tex"]
    (folder / "tables" / "odd.tex").write_text(latex(odd))
    inputs = "\n".join(rf"\input{{{path}}}" for path in (*paths, folder / "tables" / "odd.tex"))
    packages = r"\usepackage{booktabs, array, graphicx}"
    document = rf"\documentclass{{article}}{packages}\begin{{document}}{inputs}\end{{document}}"
    (tmp_path / "all.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_help_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert ", ".join(FORMATS) in " ".join(capsys.readouterr().out.split())
