"""Models as sequences of layers. They know nothing of stages or micro-batches."""

from collections.abc import Callable

from pipebench.config import ModelConfig
from pipebench.models.custom import custom
from pipebench.models.hf import hf
from pipebench.models.layers import LayerSequence
from pipebench.models.mlp import mlp
from pipebench.models.synthetic import synthetic
from pipebench.models.transformer import transformer
from pipebench.models.u_mlp import u_mlp

_BUILDERS: dict[str, Callable[..., LayerSequence]] = {
    "transformer": transformer,
    "mlp": mlp,
    "u_mlp": u_mlp,
    "synthetic": synthetic,
    "custom": custom,
    "hf": hf,
}


def layer_sequence(config: ModelConfig) -> LayerSequence:
    """Return the configured model, nothing built yet."""
    return _BUILDERS[config.kind](config)
