"""This project's own engine among the others."""

from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.pipeline import Pipeline
from pipebench.peers.protocol import Parts


def build(parts: Parts) -> Pipeline:
    return Pipeline(
        parts.schedule,
        parts.rank,
        parts.stages,
        parts.bundles,
        parts.make_optimizer,
        parts.rules,
        parts.transport,
        parts.stopwatch,
        parts.whereabouts,
        micro_batch_sizes(parts.config.batch, parts.config.micro)[0],
        parts.bundles_for,
    )
