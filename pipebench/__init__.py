"""pipebench: a lab bench for pipeline-parallel training."""

__version__ = "0.1.0"
