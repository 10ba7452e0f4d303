"""The guard of `make perf`: two runs made by hand, and what the later one has to say against the earlier."""

import json
from pathlib import Path

from hand_made import ENVIRONMENT, config, timed, write_sweep

from pipebench.config import key_of
from pipebench.perf.guard import against
from pipebench.perf.targets import Finding

STEADY = [[1.0, 1.01, 0.99, 1.0]] * 3


def part(folder: Path, *factors: float, torch: str = "2.9") -> None:
    """Write a part's sweep: the first point took a second times the first factor, and so on."""
    points = [config(micro=2**number) for number in range(len(factors))]
    results = [
        timed(
            key_of(point),
            point,
            [[factor * time for time in group] for group in STEADY],
            environment={**ENVIRONMENT, "torch": torch},
        )
        for point, factor in zip(points, factors, strict=True)
    ]
    write_sweep(folder, {key_of(point): point for point in points}, results, ["micro"])


def earlier_run(folder: Path, **measured: float) -> Path:
    folder.mkdir(exist_ok=True)
    findings = [{"target": name, "limit": 99.0, "measured": value} for name, value in measured.items()]
    (folder / "perf.json").write_text(json.dumps({"findings": findings}))
    return folder


def words(tmp_path: Path, *findings: Finding) -> str:
    return "\n".join(against(tmp_path / "then", tmp_path / "now", findings))


def test_what_became_slower_is_named_with_its_ratio(tmp_path: Path) -> None:
    part(earlier_run(tmp_path / "then") / "mlp", 1.0, 1.0, 1.0)
    part(tmp_path / "now" / "mlp", 1.0, 1.5, 1.0)
    told = words(tmp_path)
    assert told.startswith(f"Against {tmp_path / 'then'}:\n")
    assert "- mlp: 1 of 3 points slower, 2 same (K=2, M=2: 1.500, 95 % 1." in told
    assert f"`python -m pipebench.compare {tmp_path / 'then' / 'mlp'} {tmp_path / 'now' / 'mlp'}`" in told


def test_a_run_as_fast_as_before_says_so(tmp_path: Path) -> None:
    part(earlier_run(tmp_path / "then") / "mlp", 1.0, 1.0)
    part(tmp_path / "now" / "mlp", 1.0, 1.0)
    assert "- mlp: 2 of 2 points same; noise floor 1.0 %, assumed" in words(tmp_path)


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    part(earlier_run(tmp_path / "then") / "mlp", 1.0)
    part(tmp_path / "now" / "mlp", 1.0, torch="2.10")
    part(tmp_path / "now" / "new", 1.0)
    told = words(tmp_path)
    assert "- mlp: not compared: torch: A has 2.9, B has 2.10: expected the same, or --across torch." in told
    assert "- new: not measured then." in told


def test_targets_that_changed_sides_are_named_by_the_limits_of_today(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    earlier_run(tmp_path / "then", late=1.0, faster=1.2, still=0.5)
    told = words(
        tmp_path,
        Finding("late", 1.1, 1.2, None),
        Finding("faster", 1.1, 1.0, None),
        Finding("still", 1.1, 0.6, None),
        Finding("unheard of", 1.1, 0.6, None),
    )
    assert (
        "- targets: of 3 measured both times, met then and missed now: late; missed then and met now: faster." in told
    )
    assert "- targets: of 1 measured both times, none changed sides." in words(tmp_path, Finding("still", 1, 0.6, None))


def test_without_an_earlier_run_the_lines_say_that_there_is_none(tmp_path: Path) -> None:
    part(tmp_path / "now" / "mlp", 1.0)
    told = words(tmp_path)
    assert "- mlp: not measured then." in told
    assert "- targets: not compared: " in told


def test_a_ratio_is_met_only_where_it_is_told_apart_from_one() -> None:
    assert Finding("faster", 0.95, 0.80, (0.70, 0.99)).met
    assert not Finding("perhaps", 0.95, 0.80, (0.70, 1.01)).met
    assert Finding("hardly slower", 1.005, 1.003, (0.99, 1.02)).met
    assert Finding("seconds", 0.5, 0.4, None).met
