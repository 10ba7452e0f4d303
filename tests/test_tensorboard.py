"""TensorBoard as a view: its own reader finds every sample, every number of a row, every series and every figure."""

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tracked import HOST_NAME, a_config, a_failure, a_picture, a_result, all_bytes, log_to, rows_of

from pipebench.tracking import make_trackers

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs pipebench[tensorboard]"
)
plugin_data_pb2 = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")

pytestmark = pytest.mark.usefixtures("loopback_only")


@pytest.fixture
def logged(folder: Path, warnings_told: list[str], tmp_path: Path) -> Path:
    """The runs of a sweep of two points that ran and one that failed, with one figure."""
    config = dataclasses.replace(a_config(), trackers=["tensorboard"])
    trackers = make_trackers(config, folder, "my sweep", warnings_told.append)
    log_to(
        trackers, [a_result("aaa"), a_result("bbb", micro=4), a_failure("ccc")], [a_picture(tmp_path / "bubble.png")]
    )
    assert warnings_told == []
    return folder / "tensorboard"


def read(run: Path) -> Any:
    assert run.is_dir()
    return event_accumulator.EventAccumulator(str(run), size_guidance={"scalars": 0, "images": 0}).Reload()


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """Return by tag and step what the run's event file holds."""
    events = read(run)
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_a_point_is_a_run_with_every_sample_over_the_training_step(logged: Path) -> None:
    found = scalars(logged / "K=2 M=4 gpipe mlp optimizer.lr=0.1")

    for suffix in ("", "_repeat_2"):
        assert list(found[f"loss{suffix}"].items())[:4] == [(1, 2.0), (2, 1.5), (3, 1.25), (4, 1.0)]
        assert found[f"step_s{suffix}"] == pytest.approx({3: 0.5, 4: 0.6, 5: 0.7})
        assert list(found[f"bubble_fraction{suffix}"]) == [3, 4, 5]


def test_a_point_s_run_holds_every_number_of_its_row(logged: Path) -> None:
    [row] = rows_of([a_result("bbb", micro=4)])
    found = scalars(logged / "K=2 M=4 gpipe mlp optimizer.lr=0.1")

    columns = list(row)[list(row).index("step_s") :]
    numbers = {column: row[column] for column in columns if isinstance(row[column], int | float)}
    assert len(numbers) > 20
    assert {tag.removeprefix("summary/"): values for tag, values in found.items() if tag.startswith("summary/")} == {
        column: {0: pytest.approx(float(value), rel=1e-6)}  # TensorBoard keeps 32 bits
        for column, value in numbers.items()
    }


def test_the_axes_are_hyperparameters(logged: Path) -> None:
    events = read(logged / "K=2 M=4 gpipe mlp optimizer.lr=0.1")

    [content] = events.PluginTagToContent("hparams").values()
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.group_name == "bbb"
    assert start.hparams["micro"].number_value == 4
    assert start.hparams["schedule"].string_value == "gpipe"
    assert start.hparams["optimizer.lr"].number_value == 0.1
    assert start.hparams["status"].string_value == "ok"


def test_a_failed_point_of_the_same_name_gets_a_run_of_its_own(logged: Path) -> None:
    failed = logged / "K=2 M=2 gpipe mlp optimizer.lr=0.1 ccc"

    assert set(scalars(failed)) <= {"summary/bubble_bound", "summary/oversubscribed", "summary/simulated"}


def test_each_line_over_m_is_a_run_whose_tags_are_the_charts(logged: Path) -> None:
    rows = rows_of([a_result("aaa"), a_result("bbb", micro=4)])

    for run, tag, column, unit in (
        ("K=2 measured", "bubble", "bubble_fraction", 1),
        ("K=2 replayed", "bubble", "bubble_replayed", 1),
        ("K=2 bound", "bubble", "bubble_bound", 1),
        ("K=2", "samples_per_s", "samples_per_s", 1),
        ("K=2", "peak_memory_mib", "peak_memory_bytes", 2**20),
    ):
        expected = {row["micro"]: pytest.approx(row[column] / unit, rel=1e-6) for row in rows}
        assert scalars(logged / run)[tag] == expected


def test_the_figures_are_images(logged: Path, tmp_path: Path) -> None:
    [image] = read(logged / "figures").Images("bubble")

    assert (image.width, image.height) == (4, 3)
    assert image.encoded_image_string == (tmp_path / "bubble.png").read_bytes()


def test_event_files_name_no_host(logged: Path) -> None:
    assert HOST_NAME not in "".join(path.name for path in logged.rglob("*"))
    assert HOST_NAME.encode() not in all_bytes(logged)


def test_the_command_quotes_the_folder(folder: Path) -> None:
    config = dataclasses.replace(a_config(), trackers=["tensorboard"])
    [(label, command)] = make_trackers(config, folder, "my sweep", print).where()

    assert label == "TensorBoard"
    assert shlex.split(command) == ["tensorboard", "--logdir", str(folder / "tensorboard")]


def test_a_schedule_file_in_a_folder_makes_no_deeper_folder(folder: Path, warnings_told: list[str]) -> None:
    config = dataclasses.replace(a_config(), trackers=["tensorboard"])
    trackers = make_trackers(config, folder, "my sweep", warnings_told.append)
    [row] = rows_of([a_result("aaa")])
    trackers.log_point(a_result("aaa"), {**row, "schedule": "../my/own.csv"}, [])

    assert [path.name for path in (folder / "tensorboard").iterdir()] == ["K=2 M=2 .._my_own.csv mlp optimizer.lr=0.1"]


def test_torch_is_not_needed(folder: Path) -> None:
    code = """
import dataclasses, sys
from pathlib import Path
from typing import Any
from tracked import a_config, a_result, log_to
from pipebench.tracking import make_trackers
config = dataclasses.replace(a_config(), trackers=["tensorboard"])
log_to(make_trackers(config, Path(sys.argv[1]), "my sweep", print), [a_result("aaa")])
print([name for name in ("wandb", "torch", "tensorflow") if name in sys.modules])
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)

    assert done.stdout == "[]\n"
    assert len(list((folder / "tensorboard").iterdir())) == 5
