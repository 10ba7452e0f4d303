"""A saved training run without its tensors: what saved.json says, and whether a configuration can go on from it.

Each layer has a file of its own, which `harness.saving` reads and writes. The hash of each stands here, so that a layer
of another save is noticed, and files are read that hold nothing but numbers.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipebench.config import SAVED_FILE, RunConfig
from pipebench.errors import ConfigError, ResultError
from pipebench.files import own, put, read_text

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """Its class's name, and the hash of its file."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Saved:
    """How far training was; `model` and `optimizer` are the configuration's, the layers in the model's order.

    `loss_scale` and `num_good` are what the loss scale had come to (see `engine.update`), None where there was none.
    """

    step: int
    seed: int
    batch: int
    micro: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    layers: list[SavedLayer]
    loss_scale: float | None = None
    num_good: int = 0


def layer_file(index: int) -> str:
    return f"layer-{index:04}.safetensors"


def saved_after(step: int, config: RunConfig, layers: list[SavedLayer]) -> Saved:
    """Return what is to be said of a run that has trained `step` steps."""
    model, optimizer = dataclasses.asdict(config.model), dataclasses.asdict(config.optimizer)
    return Saved(step, config.seed, config.batch, config.micro, model, optimizer, layers)


def write_saved(folder: Path, saved: Saved) -> None:
    """Write saved.json, the last of a save's files. Raise OSError where that cannot be."""
    put(folder / SAVED_FILE, json.dumps({"format": FORMAT, **dataclasses.asdict(saved)}, indent=1).encode())


def read_saved(folder: Path) -> Saved:
    """Read saved.json; raise ConfigError, one line, where it is none."""
    try:
        content = json.loads(read_text(own(folder, folder / SAVED_FILE)))
        if content.pop("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT}")
        layers = [SavedLayer(**layer) for layer in content.pop("layers")]
        saved = Saved(**content, layers=layers)
        if not all(type(number) is int and number >= 0 for number in (saved.step, saved.seed)):
            raise ValueError(f"step={saved.step!r} seed={saved.seed!r}: expected whole numbers")
        if not isinstance(saved.loss_scale, float | None) or type(saved.num_good) is not int:
            raise TypeError(f"loss_scale={saved.loss_scale!r} num_good={saved.num_good!r}: expected numbers")
        if not isinstance(saved.model, dict) or not isinstance(saved.optimizer, dict):
            raise TypeError("expected names and values for model and optimizer")
    except (OSError, ResultError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"load={folder}: expected a folder that save=true made: {SAVED_FILE}: {reason}") from error
    return saved


def check_loadable(config: RunConfig) -> None:
    """Raise ConfigError, one line, where it is plain without building the model that this point cannot go on from it.

    Names and shapes of tensors are compared when they are loaded.
    """
    assert config.load is not None
    folder = Path(config.load)
    saved = read_saved(folder)
    for entry in dataclasses.fields(config.model):
        value, before = getattr(config.model, entry.name), saved.model.get(entry.name)
        if entry.name == "kind" or (entry.type is int and entry.name in saved.model):
            _expect(folder, f"model.{entry.name}", value, before)
    _expect(folder, "layers of the model", config.model.num_layers, len(saved.layers))
    _expect(folder, "optimizer.name", config.optimizer.name, saved.optimizer.get("name"))
    if saved.step % int(saved.optimizer.get("accumulate", 1)):  # gradients wait, made by these two
        for key in ("accumulate", "loss_scale"):
            _expect(folder, f"optimizer.{key}", getattr(config.optimizer, key), saved.optimizer.get(key))
    for index in range(len(saved.layers)):
        path = folder / layer_file(index)
        if path.is_symlink() or not path.is_file():
            raise ConfigError(f"load={folder}: has no file {path.name}: expected one for each layer")


def _expect(folder: Path, key: str, value: object, saved: object) -> None:
    if value != saved:
        raise ConfigError(f"{key}={value}: expected {saved}, as it was when load={folder} was saved")
