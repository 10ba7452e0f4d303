"""Mini-batches: the same for everyone who asks, whenever they ask."""

from pathlib import Path

import pytest
import torch
from plain import CLASSIFIER, MLP, SYNTHETIC, TRANSFORMER

from pipebench.config import TextConfig
from pipebench.data.teacher import teacher_batches
from pipebench.data.text import text_batches, text_files
from pipebench.errors import ConfigError

COUNTING = bytes(range(256))
"""A text in which every byte's successor is the next number."""


def text(path: Path | None, max_bytes: int = 10_000) -> TextConfig:
    return TextConfig(name="text", path=str(path) if path else None, max_bytes=max_bytes)


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    path = tmp_path / "counting.txt"
    path.write_bytes(COUNTING)
    return path


def test_a_mini_batch_depends_on_seed_and_step_not_on_who_asked_before(counting: Path) -> None:
    makers = {
        "text": lambda seed: text_batches(text(counting), TRANSFORMER.sequence, 8, seed),
        "regression": lambda seed: teacher_batches(MLP, 8, seed),
        "classification": lambda seed: teacher_batches(CLASSIFIER, 8, seed),
        "synthetic": lambda seed: teacher_batches(SYNTHETIC, 8, seed),
    }
    for name, make in makers.items():
        forward, backward, other = make(3), make(3), make(4)
        straight = [forward(step) for step in range(4)]
        torch.rand(7)
        reverse = [backward(step) for step in reversed(range(4))][::-1]
        for ours, theirs in zip(straight, reverse, strict=True):
            assert torch.equal(ours.inputs, theirs.inputs), name
            assert torch.equal(ours.targets, theirs.targets), name
        assert not torch.equal(straight[0].inputs, straight[1].inputs), name
        assert not torch.equal(straight[0].inputs, other(0).inputs), name


def test_making_a_mini_batch_leaves_the_global_generator_alone(counting: Path) -> None:
    state = torch.default_generator.get_state()
    text_batches(text(counting), TRANSFORMER.sequence, 8, 0)(0)
    teacher_batches(MLP, 8, 0)(0)
    assert torch.equal(torch.default_generator.get_state(), state)


def test_targets_of_text_are_the_successors_of_its_inputs(counting: Path) -> None:
    batch = text_batches(text(counting), TRANSFORMER.sequence, 50, 0)(0)
    assert batch.inputs.shape == batch.targets.shape == (50, TRANSFORMER.sequence)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_windows_reach_both_ends_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(COUNTING[: TRANSFORMER.sequence + 3])
    batch = text_batches(text(path), TRANSFORMER.sequence, 200, 0)(0)
    assert set(batch.inputs[:, 0].tolist()) == {0, 1, 2}
    assert int(batch.targets.max()) == TRANSFORMER.sequence + 2


def test_a_text_of_one_sample_and_its_successor_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "least.txt"
    path.write_bytes(COUNTING[: TRANSFORMER.sequence + 1])
    batch = text_batches(text(path), TRANSFORMER.sequence, 2, 0)(0)
    assert batch.inputs.tolist() == [list(range(TRANSFORMER.sequence))] * 2


def test_a_shorter_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(COUNTING[: TRANSFORMER.sequence])
    with pytest.raises(ConfigError) as caught:
        text_batches(text(path), TRANSFORMER.sequence, 2, 0)
    expected = f"data.path={path}: 6 bytes: expected at least 7, one sample and its successor"
    assert str(caught.value) == expected


def test_a_folder_is_read_in_order_of_its_names_up_to_max_bytes(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(COUNTING[4:100])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(COUNTING[:4])
    assert list(text_files(text(tmp_path))) == [tmp_path / "a" / "z.txt", tmp_path / "b.txt"]
    batch = text_batches(text(tmp_path, max_bytes=20), TRANSFORMER.sequence, 300, 0)(0)
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert int(batch.targets.max()) == 19


def test_the_default_text_is_pythons_standard_library() -> None:
    files = list(text_files(text(None)))
    assert len(files) > 50
    assert files == sorted(files)
    assert all(file.suffix == ".py" for file in files)
    assert text_batches(text(None), TRANSFORMER.sequence, 4, 0)(0).inputs.shape == (4, TRANSFORMER.sequence)


def test_a_teacher_answers_the_same_input_alike_and_not_with_a_constant() -> None:
    first, again = teacher_batches(MLP, 8, 0)(0), teacher_batches(MLP, 8, 0)(0)
    assert torch.equal(first.targets, again.targets)
    assert first.inputs.shape == (8, MLP.inputs)
    assert first.targets.shape == (8, MLP.outputs)
    assert float(first.targets.std(dim=0).min()) > 0


def test_a_classifiers_targets_are_classes() -> None:
    batch = teacher_batches(CLASSIFIER, 64, 0)(0)
    assert batch.targets.shape == (64,)
    assert batch.targets.dtype == torch.int64
    assert 1 < len(batch.targets.unique()) <= CLASSIFIER.outputs
