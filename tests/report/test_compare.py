"""Two sweeps made by hand and compared through the command: verdicts, refusals, exit codes, and what is said."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hand_made import ENVIRONMENT, config, timed, write_sweep
from hypothesis import given
from hypothesis import strategies as st

from pipebench.compare import main
from pipebench.config import MlpConfig, key_of
from pipebench.metrics import Ratio, ratio_of_medians
from pipebench.record import read_result, write_result
from pipebench.report.comparison import LEAST_FLOOR, Verdict, verdict_on

Groups = list[list[float]]

MLP = MlpConfig(name="mlp", layers=2, width=8, inputs=4, outputs=2, task="regression", dropout=0.0)
STEADY = [[1.0] * 5]
SCATTERED = [[0.5, 0.7, 1.0, 1.6, 2.2]]

ANY = st.lists(st.lists(st.floats(0.1, 10), min_size=1, max_size=12), min_size=1, max_size=4)
CLOSE = st.lists(st.lists(st.floats(0.95, 1.05), min_size=1, max_size=12), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("ratio", "floor", "verdict"),
    [
        (Ratio(1.20, 1.10, 1.30), 1.05, Verdict.SLOWER),
        (Ratio(1.04, 1.01, 1.30), 1.05, Verdict.UNDECIDED),  # sure, and below the floor, and who knows how far above
        (Ratio(1.04, 1.01, 1.05), 1.05, Verdict.SAME),
        (Ratio(1.20, 0.99, 1.30), 1.05, Verdict.UNDECIDED),  # above the floor, and yet not sure
        (Ratio(1.00, 0.97, 1.03), 1.05, Verdict.SAME),
        (Ratio(1.00, 0.90, 1.03), 1.05, Verdict.UNDECIDED),
        (Ratio(1.00, 0.97, 1.06), 1.05, Verdict.SAME),
        (Ratio(1.00, 0.97, 1.11), 1.05, Verdict.UNDECIDED),
        (Ratio(0.80, 0.70, 0.90), 1.05, Verdict.FASTER),
        (Ratio(0.97, 0.70, 0.99), 1.05, Verdict.UNDECIDED),
        (Ratio(0.80, 0.70, 1.01), 1.05, Verdict.UNDECIDED),
        (Ratio(1.00, 1.00, 1.00), 1.00, Verdict.SAME),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side_and_a_ratio_beyond_the_floor(
    ratio: Ratio, floor: float, verdict: Verdict
) -> None:
    assert verdict_on(ratio, floor) == verdict


@given(ANY, st.floats(1.0, 2.0))
def test_nothing_is_slower_or_faster_than_itself(groups: Groups, floor: float) -> None:
    assert verdict_on(ratio_of_medians(groups, groups), floor) in (Verdict.SAME, Verdict.UNDECIDED)


@given(CLOSE, st.floats(1.0, 1.3))
def test_half_as_long_again_is_slower_and_the_other_way_round_faster(groups: Groups, floor: float) -> None:
    longer = [[1.5 * seconds for seconds in group] for group in groups]
    assert verdict_on(ratio_of_medians(longer, groups), floor) == Verdict.SLOWER
    assert verdict_on(ratio_of_medians(groups, longer), floor) == Verdict.FASTER


@given(ANY, ANY, st.floats(1.0, 2.0))
def test_a_higher_floor_never_makes_a_point_slower_or_faster(one: Groups, other: Groups, floor: float) -> None:
    ratio = ratio_of_medians(one, other)
    if verdict_on(ratio, floor) in (Verdict.SAME, Verdict.UNDECIDED):
        assert verdict_on(ratio, floor * 1.5) in (Verdict.SAME, Verdict.UNDECIDED)


def a_sweep(folder: Path, samples: dict[int, Groups | None], *, again: Groups | None = None, **changes: Any) -> Path:
    """Write a sweep over M; None stands for a point not run, `again` for the first measured a second time.

    `changes` of the configuration or of the result hold for all points.
    """
    names = {"status", "message", "environment", "oversubscribed"} & set(changes)
    of_result = {name: changes.pop(name) for name in names}
    points = {key_of(point): point for point in (config(micro=micro, **changes) for micro in samples)}
    results = [
        timed(key, point, groups, **of_result)
        for (key, point), groups in zip(points.items(), samples.values(), strict=True)
        if groups is not None
    ]
    second = None if again is None else timed(results[0].key, results[0].config, again, **of_result)
    write_sweep(folder, points, results, ["micro"], second)
    return folder


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return a_sweep(tmp_path / "before", {2: STEADY, 4: STEADY})


def table(page: str) -> dict[str, list[str]]:
    """Return the cells of the table of points by the point's name."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| K=")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def verdicts(page: str) -> dict[str, str]:
    return {name: cells[0].strip("*") for name, cells in table(page).items()}


@pytest.mark.parametrize(
    ("samples", "code", "headline"),
    [
        ({2: STEADY, 4: STEADY}, 0, "**2 of 2 points same.**"),
        ({2: [[0.5] * 5], 4: STEADY}, 0, "**1 of 2 points same, 1 faster.**"),
        ({2: STEADY, 4: [[1.5] * 5]}, 1, "**1 of 2 points slower, 1 same.**"),
        ({2: STEADY, 4: SCATTERED}, 3, "**1 of 2 points undecided, 1 same.**"),
        ({2: [[1.5] * 5], 4: SCATTERED}, 1, "**1 of 2 points slower, 1 undecided.**"),
        ({2: STEADY, 4: None}, 3, "**1 of 2 points undecided, 1 same.**"),
        ({4: STEADY}, 0, "**1 of 1 point same.**"),
    ],
)
def test_the_exit_code_says_what_the_worst_verdict_is(
    samples: dict[int, Groups | None],
    code: int,
    headline: str,
    a: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    b = a_sweep(tmp_path / "after", samples)
    assert main([str(a), str(b)]) == code
    assert capsys.readouterr().out.splitlines()[0] == headline


def test_the_worst_stands_first_with_its_numbers(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = a_sweep(tmp_path / "a", dict.fromkeys((2, 3, 4, 6), STEADY))
    b = a_sweep(tmp_path / "b", {2: STEADY, 3: [[0.5] * 5], 4: [[1.5] * 5], 6: [[3.0] * 5]})
    assert main([str(a), str(b)]) == 1
    page = capsys.readouterr().out
    assert list(verdicts(page).items()) == [
        ("K=2, M=6", "slower"), ("K=2, M=4", "slower"), ("K=2, M=2", "same"), ("K=2, M=3", "faster"),
    ]  # fmt: skip
    bubble = "0.333 / 0.333 / 0.333"
    cells = ["slower", "3.000", "3.000 to 3.000", "1000", "3000", "1.000"]
    assert table(page)["K=2, M=6"][:6] == cells
    assert table(page)["K=2, M=2"][-2:] == [bubble, bubble]


def test_a_point_that_never_had_a_result_decides_nothing_beside_others(a: Path, tmp_path: Path) -> None:
    for path in a_sweep(tmp_path / "b", {2: STEADY, 4: None}).glob("runs/*/result.json"):
        write_result(path, dataclasses.replace(read_result(path), status="error"))
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    b, c = tmp_path / "b", tmp_path / "c"
    assert main([str(b), str(c)]) == 3
    for folder in (b, c):
        [key] = {path.parent.name for path in a.glob("runs/*/result.json")} - {
            path.name for path in folder.glob("runs/*")
        }
        shutil.copytree(a / "runs" / key, folder / "runs" / key)
    assert main([str(b), str(c)]) == 0


@pytest.mark.parametrize(
    ("in_a", "in_b", "verdict", "code"),
    [
        ("ok", "error", "broken", 1),
        ("ok", "wrong", "broken", 1),
        ("error", "ok", "fixed", 0),
        ("wrong", "unchecked", "fixed", 0),
        ("error", "wrong", "no result", 3),  # and there is no other point
        (None, "ok", "undecided", 3),
        ("unchecked", None, "undecided", 3),
        (None, "error", "no result", 3),
        (None, None, "no result", 3),
    ],
)
def test_a_point_without_a_result_in_one_of_them(
    in_a: str | None, in_b: str | None, verdict: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, status in (("a", in_a), ("b", in_b)):
        samples = {2: STEADY if status else None}
        a_sweep(tmp_path / name, samples, status=status or "ok", message="it | broke" if status == "error" else "")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == code
    page = capsys.readouterr().out
    assert verdicts(page) == {"K=2, M=2": verdict}
    told = {"error": "error: it &#124; broke", None: "pending"}
    assert f"- K=2, M=2: A {told.get(in_a, in_a)}; B {told.get(in_b, in_b)}\n" in page


def test_points_that_only_one_has_are_listed_and_decide_nothing(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = a_sweep(tmp_path / "b", {4: STEADY, 8: [[99.0]], 16: [[99.0]]})
    assert main([str(a), str(b)]) == 0
    page = capsys.readouterr().out
    assert "- only in A: K=2, M=2\n- only in B: K=2, M=8; K=2, M=16\n" in page
    assert set(verdicts(page)) == {"K=2, M=4"}


def test_the_larger_noise_floor_counts_wherever_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = a_sweep(tmp_path / "quiet", {2: STEADY, 4: STEADY}, again=[[1.02] * 5])
    noisy = a_sweep(tmp_path / "noisy", {2: [[1.1] * 5], 4: [[1.3] * 5]}, again=[[1.1 / 1.2] * 5])
    for one, other, slow in ((quiet, noisy, "slower"), (noisy, quiet, "faster")):
        main([str(one), str(other)])
        page = capsys.readouterr().out
        assert verdicts(page) == {"K=2, M=2": "same", "K=2, M=4": slow}
        assert "**Noise floor** 20 %, the larger of what was measured." in page
        assert "K=2, M=2 measured twice: ratio 1.020 (95 %: 1.020 to 1.020); differences below 2.0 % mean" in page


def test_without_a_noise_floor_one_per_cent_is_assumed_and_said(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert LEAST_FLOOR == 1.01
    b = a_sweep(tmp_path / "b", {2: [[1.009] * 5], 4: [[1.011] * 5]})
    main([str(a), str(b)])
    page = capsys.readouterr().out
    assert verdicts(page) == {"K=2, M=4": "slower", "K=2, M=2": "same"}
    assert "**Noise floor** 1.0 %, assumed, since neither sweep measured one." in page
    assert "- A: Not measured.\n- B: Not measured." in page


def test_a_damaged_result_breaks_its_point_alone(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY, 4: STEADY})
    [path] = [path for path in b.rglob("result.json") if '"micro":4' in path.read_text()]
    path.write_text("garbage")
    assert main([str(a), str(b)]) == 1
    assert verdicts(capsys.readouterr().out) == {"K=2, M=2": "same", "K=2, M=4": "broken"}
    assert main([str(b), str(a)]) == 0
    assert verdicts(capsys.readouterr().out) == {"K=2, M=2": "same", "K=2, M=4": "fixed"}


def test_a_floor_below_one_per_cent_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = a_sweep(tmp_path / "quiet", {2: STEADY, 4: STEADY}, again=[[1.001] * 5])
    main([str(quiet), str(quiet)])
    page = capsys.readouterr().out
    assert "**Noise floor** 1.0 %, the least that is taken, since less was measured." in page


def test_a_second_look_that_failed_is_no_noise_floor(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY}, again=[[9.0] * 5])
    path = next(b.glob("runs/*/again.json"))
    write_result(path, dataclasses.replace(read_result(path), status="error", message="gone"))
    main([str(a), str(b)])
    page = capsys.readouterr().out
    assert "assumed, since neither sweep measured one" in page
    assert "- B: Not known: K=2, M=2 measured twice, error: gone." in page


def test_simulated_points_are_exact_so_any_difference_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = {"engine": "simulate", "status": "simulated"}
    a = a_sweep(tmp_path / "a", {2: [[1.0]], 4: [[1.0]], 8: [[1.0]]}, **simulated)
    b = a_sweep(tmp_path / "b", {2: [[1.0]], 4: [[1.001]], 8: [[0.999]]}, **simulated)
    assert main([str(a), str(b)]) == 1
    page = capsys.readouterr().out
    assert verdicts(page) == {"K=2, M=4": "slower", "K=2, M=2": "same", "K=2, M=8": "faster"}
    assert table(page)["K=2, M=4"][2:5] == ["1.001 to 1.001", "1000 simulated", "1001 simulated"]


ELSEWHERE = {**ENVIRONMENT, "processor": "Other CPU", "memory_bytes": 8 * 2**30}


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({**ENVIRONMENT, "torch": "2.10"}, "torch: A has 2.9, B has 2.10: expected the same, or --across torch"),
        (
            ELSEWHERE,
            "machine: A has Test <CPU>, 2 cores, 4 GiB, Linux 6.1, B has Other CPU, 2 cores, 8 GiB, Linux 6.1:"
            " expected the same, or --across machine",
        ),
        (
            {**ENVIRONMENT, "gpu": "GPU", "gpus": 2},
            "machine: A has Test <CPU>, 2 cores, 4 GiB, Linux 6.1,"
            " B has Test <CPU>, 2 cores, 4 GiB, 2 x GPU, Linux 6.1: expected the same, or --across machine",
        ),
        (
            {**ENVIRONMENT, "system": "Linux 6.2", "torch": "2.10"},
            "machine: A has Test <CPU>, 2 cores, 4 GiB, Linux 6.1, B has Test <CPU>, 2 cores, 4 GiB, Linux 6.2;"
            " torch: A has 2.9, B has 2.10: expected the same, or --across machine,torch",
        ),
    ],
)
def test_another_machine_or_torch_is_refused_unless_told_to_and_then_said(
    environment: dict[str, Any], line: str, a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY}, environment=environment)
    assert main([str(a), str(b)]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"CompareError: {line}\n")
    permitted = line.rpartition(" ")[2]
    assert main([str(a), str(b), "--across", permitted]) == 0
    page = capsys.readouterr().out
    for name in permitted.split(","):
        assert f"**Across {name}**: A has " in page


@pytest.mark.parametrize("changed", ["git", "pipebench", "numpy", "python"])
def test_what_is_being_compared_is_no_reason_to_refuse(
    changed: str, a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY}, environment={**ENVIRONMENT, changed: "new|er"})
    assert main([str(a), str(b)]) == 0
    assert "new&#124;er" in capsys.readouterr().out


def test_memory_that_a_boot_takes_makes_no_other_machine(a: Path, tmp_path: Path) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY}, environment={**ENVIRONMENT, "memory_bytes": 4 * 2**30 - 10**6})
    assert main([str(a), str(b)]) == 0


def test_ranks_that_share_devices_in_another_way_are_refused_unless_told_to_and_then_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Four ranks on two cores, and on four: that is another machine too.
    a = a_sweep(tmp_path / "a", {4: STEADY}, model=MLP, stages=4)
    b = a_sweep(tmp_path / "b", {4: STEADY}, model=MLP, stages=4, environment={**ENVIRONMENT, "cores": 4})
    assert main([str(a), str(b), "--across", "machine"]) == 2
    assert capsys.readouterr().err == (
        "CompareError: ranks: A has 2 a device at K=4, M=4, B has 1: expected the same, or --across machine,ranks\n"
    )
    assert main([str(a), str(b), "--across", "machine,ranks"]) == 0
    assert "**Across ranks**: A has 2 a device at K=4, M=4, B has 1." in capsys.readouterr().out


def test_more_cores_than_ranks_need_are_no_difference_in_ranks(tmp_path: Path) -> None:
    a = a_sweep(tmp_path / "a", {4: STEADY}, model=MLP)
    b = a_sweep(tmp_path / "b", {4: STEADY}, model=MLP, environment={**ENVIRONMENT, "cores": 4})
    assert main([str(a), str(b), "--across", "machine"]) == 0


def test_across_machines_points_are_paired_without_what_the_machine_resolved(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY, 8: STEADY}, threads=4, device="cuda", environment=ELSEWHERE)
    assert main([str(a), str(b), "--across", "machine"]) == 0
    page = capsys.readouterr().out
    assert set(verdicts(page)) == {"K=2, M=2"}
    assert "- only in A: K=2, M=4\n- only in B: K=2, M=8\n" in page


def test_on_one_machine_other_threads_are_another_point(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY, 4: STEADY}, threads=2)
    for options in ([], ["--across", "machine"]):
        assert main([str(a), str(b), *options]) == 2
        assert capsys.readouterr().err == (
            "CompareError: none of A's 2 points is among B's 2: expected the same settings; all differ in threads\n"
        )


def test_threads_that_were_swept_are_part_of_the_point_on_every_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, device, environment in (("a", "cpu", ENVIRONMENT), ("b", "cuda", ELSEWHERE)):
        points = {key_of(point): point for point in (config(threads=threads, device=device) for threads in (1, 2))}
        results = [
            timed(key, point, [[float(point.threads)]], environment=environment) for key, point in points.items()
        ]
        write_sweep(tmp_path / name, points, results, ["threads"])
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--across", "machine"]) == 0
    assert verdicts(capsys.readouterr().out) == {"K=2, M=2, threads=1": "same", "K=2, M=2, threads=2": "same"}


def test_rows_from_a_file_are_paired_by_their_key_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file may be gone or changed, so what it held is known by the key and no other way."""
    for name, threads, environment in (("a", 1, ENVIRONMENT), ("b", 1, ELSEWHERE), ("c", 2, ELSEWHERE)):
        point = config(schedule="gone.csv", threads=threads)
        key = f"{threads}" * 12
        write_sweep(tmp_path / name, {key: point}, [timed(key, point, STEADY, environment=environment)], ["micro"])
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--across", "machine"]) == 0
    assert main([str(tmp_path / "a"), str(tmp_path / "c"), "--across", "machine"]) == 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_folder_that_is_no_sweep_is_one_line_and_exit_code_2(
    which: int, a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(a), str(a)]
    folders[which] = str(tmp_path / "nowhere")
    assert main(folders) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("ResultError: ")
    assert told.err.count("\n") == 1


def test_a_second_look_that_is_broken_is_no_noise_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY}, again=STEADY)
    [path] = b.rglob("again.json")
    path.write_text("{")
    assert main([str(b), str(b)]) == 0
    told = capsys.readouterr().out
    assert "**Noise floor** 1.0 %, assumed" in told
    assert "measured twice, unreadable: runs/" in told


@pytest.mark.parametrize("twice", ["../../../etc", "ffffffffffff"])
def test_a_second_look_at_no_point_of_the_sweep_is_one_line_and_exit_code_2(
    twice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY}, again=STEADY)
    [key] = [path.name for path in (b / "runs").iterdir()]
    text = (b / "sweep.json").read_text()
    (b / "sweep.json").write_text(text.replace(f'"noise_floor":"{key}"', f'"noise_floor":"{twice}"'))
    assert main([str(b), str(b)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ResultError: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("missing", ["cores", "memory_bytes", "torch"])
def test_an_environment_that_says_too_little_is_a_result_error(
    missing: str, a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != missing}
    b = a_sweep(tmp_path / "b", {2: STEADY}, environment=environment)
    assert main([str(a), str(b)]) == 2
    assert capsys.readouterr().err.startswith("ResultError: ")


def test_steps_that_took_no_time_are_no_result(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = a_sweep(tmp_path / "b", {2: [[0.0] * 5]})
    assert main([str(a), str(b)]) == 1
    assert verdicts(capsys.readouterr().out) == {"K=2, M=2": "broken"}


def test_only_what_may_differ_can_be_permitted(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(a), str(a), "--across", "machine,kernel"])
    assert caught.value.code == 2
    assert "kernel: expected some of machine, torch, ranks" in capsys.readouterr().err


def test_the_page_goes_into_a_file_as_well(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert main([str(a), str(a), "--output", str(page)]) == 0
    assert page.read_text() == capsys.readouterr().out
    assert main([str(a), str(a), "--output", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "the comparison cannot be written" in told.err


def test_what_a_folder_is_called_stays_text(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = a.with_name("a | <b> `c`")
    shutil.copytree(a, strange)
    assert main([str(a), str(strange)]) == 0
    page = capsys.readouterr().out
    assert re.search(r"\| folder +\| before +\| a &#124; &#60;b&#62; &#96;c&#96; +\|\n", page)
    assert "Test &#60;CPU&#62;" in page
    assert str(a.parent) not in page, "where the folders lie is nobody else's concern"


def test_flags_of_a_point_stand_at_its_times(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = a_sweep(tmp_path / "b", {2: STEADY}, oversubscribed=True, status="unchecked")
    main([str(a), str(b)])
    page = capsys.readouterr().out
    assert table(page)["K=2, M=2"][3:5] == ["1000", "1000&#42; unchecked"]
    assert "- `*` oversubscribed" in page
    assert "- `~`" not in page
