"""Any command line, sensible or not: a grid is refused in one line before anything starts, or has a row per point.

In one process and without real points where it can be, since hundreds are tried.
"""

import random
import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipebench.cli import main
from pipebench.report.sweep import read_sweep

VALID = (
    "stages=2 micro=4",
    "-m stages=1,2,4 micro=2,4 schedule=gpipe,1f1b",
    "-m engine=simulate model=synthetic stages=2,4 micro=4 schedule=zb_h1,zb_v",
    "-m model=mlp model.layers=4 recompute=never,always partition=uniform",
    "partition=[9,9] optimizer=sgd optimizer.lr=0.1 precision=bf16",
    "model.tied=true precision=fp16 optimizer.loss_scale=dynamic optimizer.clip_norm=1 optimizer.accumulate=2",
    "optimizer.lr_schedule=cosine optimizer.lr_warmup=2 optimizer.lr_decay=9 optimizer.lr_floor=0.1",
    "-m experiment=quick steps=2 warmup=1",
    "wandb.mode=disabled trackers=[wandb,tensorboard] wandb.project=mine",
    "data.path=null data.max_bytes=100000 gate=off noise_floor=false",
    "schedule=zb_auto memory_limit=1.5p chunks=auto stages=2",
    "device=cpu threads=1 repeats=2 seed=7 dry_run=true force=true",
)
HOSTILE = (
    "", "=", ",", "null", "-1", "0", "1e999", "nan", "[]", "[1", "{", "}", "'", '"', "\\", "${stages}",
    "${oc.env:HOME}", "???", "true", "two", "1.5", "99999999999999999999", "../../etc/passwd", "é\N{SNOWMAN}",
    "a b", "~", "+", "++x",
    "choice(1,2", "range(1,3)", "glob(*)", "sort(1,2)", "interval(1,2)", "x=y=z", "\x00", "\n", "-m", "--", "%",
    "$(id)",
)  # fmt: skip
NUM_MALFORMED = 300


def malformed(seed: int) -> list[str]:
    """Return a valid command line with one to three small wrongs."""
    choose = random.Random(seed)
    words = shlex.split(choose.choice(VALID))
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(len(words))
        key, equals, value = words[at].partition("=")
        words[at] = choose.choice([
            f"{key}={choose.choice(HOSTILE)}",
            f"{key}{choose.choice(HOSTILE)}{equals}{value}",
            f"{choose.choice(HOSTILE)}{words[at]}",
            f"{words[at]}{choose.choice(HOSTILE)}",
            key[: choose.randint(0, max(0, len(key) - 1))] + equals + value,
            f"{key}={value[::-1]}x",
            f"{key}.{key}={value}",
        ])  # fmt: skip
    return words


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Stand in for the sweep: note that a command line was accepted, in an empty folder."""
    accepted: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipebench.cli._take_and_run", lambda plan, first: accepted.append("run") or 0)
    monkeypatch.setattr("pipebench.cli.preview", lambda plan, profile: accepted.append("dry run"))
    return accepted


def test_hundreds_of_malformed_command_lines_are_one_line_each(
    nothing_runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, seed = 0, 0
    while refused < NUM_MALFORMED:
        arguments, seed = malformed(seed), seed + 1
        nothing_runs.clear()
        try:
            code = main(arguments)
        except BaseException as error:
            pytest.fail(f"{arguments}: {type(error).__name__}: {error}")
        told = capsys.readouterr()
        if code == 0:  # what the change made of it is sensible too, such as another seed
            assert nothing_runs or told.out, arguments
            continue
        assert code == 2, arguments
        assert told.err.startswith(("ConfigError: ", "ScheduleError: ")), (arguments, told.err)
        assert told.err.count("\n") == 1, (arguments, told.err)
        assert "Traceback" not in told.out, arguments
        assert not nothing_runs, arguments
        assert list(tmp_path.iterdir()) == [], arguments
        refused += 1
    assert seed < 2 * NUM_MALFORMED, "most command lines that are tried should be malformed"


@st.composite
def grids(draw: st.DrawFn) -> list[str]:
    """Draw a grid of simulated points, among them such as cannot run."""

    def some(*values: str) -> str:
        return ",".join(draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True)))

    keys = {
        "stages": some("1", "2", "3", "4", "9"),
        "micro": some("1", "2", "3", "8", "33"),
        "schedule": some("gpipe", "naive", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "v_half"),
        "chunks": some("auto", "1", "2", "3"),
        "recompute": some("never", "except_last", "always"),
        "partition": some("time", "parameters", "uniform", "[4,4]", "[7,2]"),
        "batch": some("8", "9", "32"),
        "model.layers": some("4", "8"),
        "model.imbalance": some("0", "0.5"),
        "optimizer": some("sgd", "adamw"),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(keys)), min_size=1, max_size=4, unique=True))
    return [f"{key}={keys[key]}" for key in chosen]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(grid=grids())
def test_any_grid_is_refused_in_one_line_or_has_a_row_per_point(
    grid: list[str], tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    results_dir = tmp_path_factory.mktemp("grid") / "results"
    code = main(["-m", "engine=simulate", "model=synthetic", "trackers=[]", f"results_dir={results_dir}", *grid])
    told = capsys.readouterr()
    if code == 2:
        assert (told.err.count("\n"), results_dir.exists()) == (1, False), (grid, told.err)
        return
    assert (code, told.err) == (0, ""), grid
    [folder] = results_dir.iterdir()
    sweep = read_sweep(folder)
    assert [row["status"] for row in sweep.rows] == ["simulated"] * len(sweep.points)
    assert f"{len(sweep.rows)} point{'s' if len(sweep.rows) > 1 else ''} and " in told.out, grid


@pytest.mark.parametrize(
    "grid",
    [
        "stages=1,2 micro=1,3 schedule=gpipe,1f1b",
        "stages=2 micro=2 model.layers=4 recompute=never,always precision=fp32,bf16",
    ],
)
def test_a_real_grid_has_a_row_per_point(grid: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model=mlp", "model.width=8", "batch=4", "steps=2", "warmup=1", "trackers=[]", "noise_floor=false"]
    assert main(["-m", *small, f"results_dir={tmp_path}", *grid.split()]) == 0
    [folder] = tmp_path.iterdir()
    sweep = read_sweep(folder)
    assert [row["status"] for row in sweep.rows] == ["ok"] * len(sweep.points)
