"""What the parent tells its workers. Plain data: the parent never imports torch, so neither does this file."""

from dataclasses import dataclass

from pipebench.config import DataConfig, ModelConfig, RunConfig
from pipebench.record import LayerRun
from pipebench.schedule.action import Schedule

MEASURE_RANK = "pipebench.harness.worker:measure_rank"
MEASURE_LINK = "pipebench.harness.link:measure_link"
MEASURE_SPAN_COST = "pipebench.harness.span_cost:span_cost"
PROFILE_LAYERS = "pipebench.harness.profile:profile_layers"
WEIGH_MODEL = "pipebench.harness.profile:weigh_model"
VET = "pipebench.harness.vet:vet"


@dataclass(frozen=True, slots=True)
class RankJob:
    """One rank of a point: its row in a validated schedule, its share of the layers, its cores.

    `runs` say of each layer of the model whether its forward runs again inside its backward. `cores` is empty when
    there are not enough to give every rank its own; `model_bytes` are the weights of the whole model; `store` is a file
    through which the ranks find each other, and `save_in` the folder to save what was trained in, "" for nowhere.
    """

    config: RunConfig
    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    runs: tuple[LayerRun, ...]
    model_bytes: int
    rank: int
    cores: tuple[int, ...]
    store: str
    save_in: str = ""


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """Measure the layers of `config`'s model on `num_samples` samples: their bytes, and if `timed` their seconds."""

    config: RunConfig
    num_samples: int
    timed: bool
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeighJob:
    """Find out how large the weights of `config`'s model are."""

    config: RunConfig


@dataclass(frozen=True, slots=True)
class VetJob:
    """Look at `config`'s model and data, which are a user's own, before anything starts."""

    config: RunConfig


@dataclass(frozen=True, slots=True)
class Vetted:
    """Model and data with all that the bench must know of them; `refusal`, one line, says why they cannot be run."""

    model: ModelConfig
    data: DataConfig
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class LinkJob:
    """One of two ranks that measure what lies between them on `config`'s device."""

    config: RunConfig
    rank: int
    cores: tuple[int, ...]
    store: str
