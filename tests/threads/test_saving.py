"""Training that is saved and gone on with, cut otherwise and on another schedule, is training that never stopped."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from plain import SEED, TRANSFORMER, assert_identical, parameters, sequence_of
from ranks import Outcome, Point, run
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from pipebench.compose import compose_grid
from pipebench.config import OptimizerConfig, RunConfig
from pipebench.data.batch import MiniBatch
from pipebench.engine.optimizer import make_optimizer
from pipebench.engine.pipeline import Pipeline
from pipebench.errors import ConfigError
from pipebench.harness.saving import load_layers, save_layer
from pipebench.models.layers import LayerSequence, build_layers, layout_of, one_by_one
from pipebench.saved import SavedLayer, check_loadable, layer_file, read_saved, saved_after, write_saved
from pipebench.schedule.builders import Recompute

OPTIMIZERS = {
    "sgd": OptimizerConfig(name="sgd", lr=0.1),
    "momentum": OptimizerConfig(name="sgd", lr=0.1, momentum=0.9),
    "adamw": OptimizerConfig(name="adamw", lr=0.01, decay="matrices"),
    "scheduled, clipped and scaled": OptimizerConfig(
        name="adamw", lr=0.01, lr_schedule="cosine", lr_warmup=2, lr_decay=8, clip_norm=0.5, loss_scale="dynamic"
    ),
    "accumulating": OptimizerConfig(name="adamw", lr=0.01, accumulate=2),
}
"""The last is saved between a mini-batch and the one that ends its update."""


class TiedTable(nn.Linear):
    """A projection whose weight is another layer's too."""

    ties = {"weight": "table"}  # noqa: RUF012


def with_batch_norm() -> LayerSequence:
    """No bias before the norm: its gradient would be rounding alone, of which Adam makes whole steps."""
    makers: list[Callable[[], nn.Module]] = [
        partial(nn.Linear, 8, 16, bias=False),
        partial(nn.BatchNorm1d, 16),
        partial(nn.Dropout, 0.3),
        partial(nn.Linear, 16, 4),
    ]
    return LayerSequence(len(makers), one_by_one(makers), functional.mse_loss)


def with_tie() -> LayerSequence:
    makers: list[Callable[[], nn.Module]] = [
        partial(TiedTable, 8, 8),
        nn.Tanh,
        partial(nn.Dropout, 0.3),
        partial(TiedTable, 8, 8, bias=False),
        partial(nn.Linear, 8, 4),
    ]
    return LayerSequence(len(makers), one_by_one(makers), functional.mse_loss)


def numbers(step: int, num_samples: int) -> MiniBatch:
    generator = torch.Generator().manual_seed(step)
    return MiniBatch(torch.randn(num_samples, 8, generator=generator), torch.randn(num_samples, 4, generator=generator))


def config(*overrides: str) -> RunConfig:
    grid = compose_grid(["model=mlp", "data=teacher", *overrides])
    assert grid is not None
    return grid.points[0]


def saver(model: LayerSequence, folder: Path, waiting: bool = False) -> Callable[[Pipeline], None]:
    """Return what saves a rank's layers, with gradients where they wait for an update."""

    def save(pipeline: Pipeline) -> None:
        gradients = pipeline.gradients() if waiting else {}
        for index, layer in pipeline.layers.items():
            save_layer(folder, index, layer, pipeline.optimizers, gradients.get(index, []), layout_of(model))

    return save


def loader(model: LayerSequence, folder: Path) -> Callable[[Pipeline], None]:
    def load(pipeline: Pipeline) -> None:
        load_layers(folder, read_saved(folder), pipeline.layers, pipeline.optimizers, layout_of(model))

    return load


def say_saved(model: LayerSequence, folder: Path, step: int) -> None:
    """Write saved.json about the layers' files that lie there."""
    names = layout_of(model).names
    hashes = [hashlib.sha256((folder / layer_file(i)).read_bytes()).hexdigest() for i in range(len(names))]
    layers = [SavedLayer(*each) for each in zip(names, hashes, strict=True)]
    write_saved(folder, saved_after(step, config(), layers))


def interrupted(before: Point, after: Point, folder: Path, optimizer: OptimizerConfig) -> tuple[Outcome, Outcome]:
    """Train three steps, save, load into what else is built, and train three more."""
    model = sequence_of(before.model)
    first = run(before, 3, True, optimizer, save=saver(model, folder, waiting=optimizer.accumulate > 1))
    say_saved(model, folder, 3)
    assert read_saved(folder).step == 3
    return first, run(after, 3, True, optimizer, first_step=3, load=loader(model, folder))


@pytest.mark.parametrize("settings", OPTIMIZERS)
@pytest.mark.parametrize("name", ["transformer", "batch norm", "tie"])
def test_losses_after_going_on_are_those_of_training_that_never_stopped(
    name: str, settings: str, tmp_path: Path
) -> None:
    """From K=2 GPipe to K=3 1F1B, cut elsewhere, with every forward run again."""
    model = {"transformer": TRANSFORMER, "batch norm": with_batch_norm(), "tie": with_tie()}[name]
    data = None if name == "transformer" else numbers
    optimizer = OPTIMIZERS[settings]
    before = Point(model, "gpipe", num_stages=2, data=data)
    after = Point(model, "1f1b", Recompute.ALWAYS, num_stages=3, data=data)
    whole = run(before, 6, True, optimizer)
    first, second = interrupted(before, after, tmp_path, optimizer)
    assert [*first.losses, *second.losses] == pytest.approx(whole.losses, rel=1e-6)
    for mine, other in zip(buffers(second.layers), buffers(whole.layers), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "recompute", "num_ranks"),
    [
        ("zb_v", Recompute.LAYER, 2),
        ("interleaved", Recompute.NEVER, 2),
        ("zb_h1", Recompute.ALWAYS, 4),
        ("gpipe", Recompute.NEVER, 1),
    ],
)
def test_training_goes_on_on_any_schedule_and_number_of_ranks(
    name: str, recompute: Recompute, num_ranks: int, tmp_path: Path
) -> None:
    before = Point(TRANSFORMER, "interleaved", num_stages=2)
    whole = run(before, 6, True, OPTIMIZERS["adamw"])
    after = Point(TRANSFORMER, name, recompute, num_ranks)
    first, second = interrupted(before, after, tmp_path, OPTIMIZERS["adamw"])
    assert [*first.losses, *second.losses] == pytest.approx(whole.losses, rel=1e-6)


def buffers(layers: Sequence[nn.Module]) -> list[Tensor]:
    return [buffer for layer in layers for buffer in layer.buffers()]


def test_going_on_with_the_same_cut_and_schedule_changes_no_bit(tmp_path: Path) -> None:
    point = Point(with_batch_norm(), "1f1b", data=numbers)
    whole = run(point, 6, True, OPTIMIZERS["adamw"])
    first, second = interrupted(point, point, tmp_path, OPTIMIZERS["adamw"])
    assert [*first.losses, *second.losses] == whole.losses
    assert_identical(parameters(second.layers), parameters(whole.layers))


def test_without_the_optimizers_state_or_the_step_the_losses_would_be_others(tmp_path: Path) -> None:
    model = with_batch_norm()
    point = Point(model, "1f1b", data=numbers)
    whole = run(point, 6, True, OPTIMIZERS["momentum"])
    interrupted(point, point, tmp_path, OPTIMIZERS["momentum"])

    def load_weights_alone(pipeline: Pipeline) -> None:
        load_layers(tmp_path, read_saved(tmp_path), pipeline.layers, [], layout_of(model))

    stateless = run(point, 3, True, OPTIMIZERS["momentum"], first_step=3, load=load_weights_alone)
    from_the_first = run(point, 3, True, OPTIMIZERS["momentum"], load=loader(model, tmp_path))
    for losses in (stateless.losses, from_the_first.losses):
        assert losses[1:] != pytest.approx(whole.losses[4:], rel=1e-4)


def test_a_file_holds_a_layer_under_the_models_own_names(tmp_path: Path) -> None:
    model = with_batch_norm()
    run(Point(model, "gpipe", data=numbers), 1, True, OPTIMIZERS["adamw"], save=saver(model, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [layer_file(index) for index in range(4)]
    with safe_open(tmp_path / "layer-0001.safetensors", "pt") as file:
        states = [
            f"optimizer.{name}.{state}" for name in ("bias", "weight") for state in ("exp_avg", "exp_avg_sq", "step")
        ]
        assert sorted(file.keys()) == sorted(
            ["bias", "weight", "running_mean", "running_var", "num_batches_tracked", *states]
        )
    assert safetensors.torch.load_file(tmp_path / "layer-0002.safetensors") == {}


def test_a_tied_parameter_is_saved_once_at_its_first_place(tmp_path: Path) -> None:
    model = with_tie()
    run(Point(model, "gpipe", num_stages=1, data=numbers), 1, True, OPTIMIZERS["sgd"], save=saver(model, tmp_path))
    assert set(safetensors.torch.load_file(tmp_path / layer_file(0))) == {"weight", "bias"}
    assert set(safetensors.torch.load_file(tmp_path / layer_file(3))) == set()


def test_copies_of_a_tied_parameter_are_all_read_from_its_first_place(tmp_path: Path) -> None:
    model = with_tie()
    point = Point(model, "gpipe", num_stages=1, data=numbers)
    whole = run(point, 2, True, OPTIMIZERS["momentum"], save=saver(model, tmp_path))
    say_saved(model, tmp_path, 2)
    [copy] = build_layers(model, [3], SEED + 1)
    optimizer = make_optimizer(OPTIMIZERS["momentum"], list(copy.parameters()))
    load_layers(tmp_path, read_saved(tmp_path), {3: copy}, [optimizer], layout_of(model))
    assert torch.equal(copy.get_parameter("weight"), whole.layers[0].get_parameter("weight"))
    assert "momentum_buffer" in optimizer.state[copy.get_parameter("weight")]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Return a save of the MLP with batch norm."""
    model = with_batch_norm()
    run(Point(model, "gpipe", data=numbers), 1, True, OPTIMIZERS["sgd"], save=saver(model, tmp_path))
    say_saved(model, tmp_path, 1)
    return tmp_path


def refusal(save: Path, model: LayerSequence) -> str:
    layers = dict(enumerate(build_layers(model, range(model.num_layers), SEED)))
    with pytest.raises(ConfigError) as caught:
        load_layers(save, read_saved(save), layers, [], layout_of(model))
    return str(caught.value).replace(str(save), "SAVE")


def changed(index: int, layer: Callable[[], nn.Module]) -> LayerSequence:
    makers: list[Callable[[], nn.Module]] = [
        partial(nn.Linear, 8, 16, bias=False),
        partial(nn.BatchNorm1d, 16),
        partial(nn.Dropout, 0.3),
        partial(nn.Linear, 16, 4),
    ]
    makers[index] = layer
    return LayerSequence(4, one_by_one(makers), functional.mse_loss)


def test_another_model_is_refused_with_the_layer_the_name_and_the_shapes(save: Path) -> None:
    assert refusal(save, changed(0, partial(nn.Linear, 8, 12, bias=False))) == (
        "load=SAVE: layer 0 (Linear): weight was saved as float32 [16, 8]: "
        "expected float32 [12, 8], as this model has it"
    )
    assert refusal(save, changed(2, partial(nn.LayerNorm, 16))) == (
        "load=SAVE: layer 2 (LayerNorm): weight was not saved: expected the names of this model"
    )
    assert refusal(save, changed(3, partial(nn.Linear, 16, 4, bias=False))) == (
        "load=SAVE: layer 3 (Linear): has bias in its file: expected the names of this model"
    )


def test_a_layer_of_another_save_is_refused(save: Path) -> None:
    path = save / layer_file(3)
    path.write_bytes((save / layer_file(0)).read_bytes())
    assert refusal(save, with_batch_norm()) == (
        "load=SAVE: layer-0003.safetensors: is of another save, or was changed since"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("[1]", "'str' object cannot be interpreted as an integer"),
        ('{"format": 7}', "expected format 1"),
        (
            '{"format": 1, "layers": [{"name": "x"}]}',
            "SavedLayer.__init__() missing 1 required positional argument: 'sha256'",
        ),
    ],
)
def test_a_folder_that_is_no_save_is_refused_before_anything_starts(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        check_loadable(config(f"load={tmp_path}"))
    assert str(caught.value) == f"load={tmp_path}: expected a folder that save=true made: saved.json: {reason}"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.width=8", "model.width=8: expected 256"),
        ("optimizer=sgd", "optimizer.name=sgd: expected adamw"),
        ("model=synthetic", "model.kind=synthetic: expected mlp"),
    ],
)
def test_another_configuration_is_refused_before_anything_starts(override: str, reason: str, tmp_path: Path) -> None:
    write_saved(tmp_path, saved_after(5, config(), [SavedLayer("Linear", "")] * config().model.num_layers))
    with pytest.raises(ConfigError) as caught:
        check_loadable(config(f"load={tmp_path}", override))
    assert str(caught.value) == f"{reason}, as it was when load={tmp_path} was saved"


def test_a_missing_layer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_saved(tmp_path, saved_after(5, config(), [SavedLayer("Linear", "")] * config().model.num_layers))
    with pytest.raises(ConfigError, match=r"has no file layer-0000\.safetensors: expected one for each layer"):
        check_loadable(config(f"load={tmp_path}"))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("optimizer.accumulate=3", "optimizer.accumulate=3: expected 2"),
        ("optimizer.loss_scale=1024", "optimizer.loss_scale=1024: expected None"),
    ],
)
def test_gradients_that_wait_for_an_update_are_not_mixed_with_others(
    override: str, reason: str, tmp_path: Path
) -> None:
    before, layers = config("optimizer.accumulate=2"), [SavedLayer("Linear", "")] * config().model.num_layers
    write_saved(tmp_path, saved_after(5, before, layers))
    with pytest.raises(ConfigError) as caught:
        check_loadable(config(f"load={tmp_path}", "optimizer.accumulate=2", override))
    assert str(caught.value) == f"{reason}, as it was when load={tmp_path} was saved"
