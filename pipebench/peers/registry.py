"""Where each engine of the bench is built."""

from importlib import import_module

from pipebench.peers.protocol import Engine, Parts

BUILDERS = {
    "pipebench": "pipebench.peers.built_in",
    "torch": "pipebench.peers.torch_pipelining",
    "single": "pipebench.peers.single",
    "ddp": "pipebench.peers.ddp",
    "fsdp": "pipebench.peers.fsdp",
    "deepspeed": "pipebench.peers.deepspeed_pipeline",
    "torchgpipe": "pipebench.peers.torchgpipe_threads",
}
"""The module of each engine; its `build(parts)` makes one. Imported when wanted: some take seconds."""


def build_engine(parts: Parts) -> Engine:
    """Return this rank of the point's engine."""
    engine: Engine = import_module(BUILDERS[parts.config.engine]).build(parts)
    return engine
