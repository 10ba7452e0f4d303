"""Let users' own models and data in: each is looked at by a worker once, before any point starts.

Config checks cannot know how many layers a function returns or a family of models has. What the worker finds goes into
the points, which then are checked, named and run as those of built-in models. Nothing happens for these.
"""

import dataclasses
from collections.abc import Sequence

from pipebench.config import RunConfig, check
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.errors import ConfigError
from pipebench.harness.failures import GroupError
from pipebench.harness.jobs import VET, VetJob, Vetted
from pipebench.harness.launch import run_group
from pipebench.harness.limits import Limits
from pipebench.harness.sweep import scratch


def is_to_vet(point: RunConfig) -> bool:
    """Tell whether a point's model or data is not the bench's own."""
    return point.model.kind in ("custom", "hf") or point.data.kind == "custom"


def admitted(points: Sequence[RunConfig]) -> list[RunConfig]:
    """Return the points with all that must be known of their models; raise ConfigError for what cannot run."""
    known: dict[str, Vetted] = {}
    return [_admitted(point, known) if is_to_vet(point) else point for point in points]


def _admitted(point: RunConfig, known: dict[str, Vetted]) -> RunConfig:
    check(point)
    sizes = set(micro_batch_sizes(point.batch, point.micro))
    name = repr((point.model, point.data, point.batch, sizes, point.seed))
    if name not in known:
        known[name] = _vetted(point)
    return dataclasses.replace(point, model=known[name].model, data=known[name].data)


def _vetted(point: RunConfig) -> Vetted:
    try:
        with scratch() as folder:
            [found] = run_group(VET, [VetJob(point)], "cpu", lambda progress: None, Limits(None, None, 0), folder)
    except GroupError as error:
        raise ConfigError(f"model={point.model.name} with data={point.data.name}: {error}") from error
    assert isinstance(found, Vetted)
    if found.refusal:
        raise ConfigError(found.refusal)
    return found
