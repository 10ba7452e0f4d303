"""Bytes of real text: by default the source of the running Python's standard library, which needs no download."""

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pipebench.config import TextConfig
from pipebench.data.batch import MiniBatch
from pipebench.errors import ConfigError
from pipebench.seeds import Purpose, seed_of


def text_batches(config: TextConfig, sequence: int, batch: int, seed: int) -> Callable[[int], MiniBatch]:
    """Return random windows of `sequence` bytes with their successors; inputs and targets are [batch, sequence]."""
    corpus = _read(config, at_least=sequence + 1)

    def mini_batch(step: int) -> MiniBatch:
        generator = torch.Generator().manual_seed(seed_of(seed, Purpose.DATA, step))
        starts = torch.randint(len(corpus) - sequence, (batch, 1), generator=generator)
        windows = corpus[starts + torch.arange(sequence + 1)].long()
        return MiniBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    return mini_batch


def text_files(config: TextConfig) -> Iterator[Path]:
    """Yield the files to read, in an order that does not depend on the file system."""
    if config.path is None:
        yield from sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        return
    path = Path(config.path)
    if path.is_dir():
        yield from (file for file in sorted(path.rglob("*")) if file.is_file())
    else:
        yield path


def _read(config: TextConfig, at_least: int) -> Tensor:
    content = bytearray()
    for file in text_files(config):
        content += file.read_bytes()[: config.max_bytes - len(content)]
        if len(content) >= config.max_bytes:
            break
    if len(content) < at_least:
        raise ConfigError(
            f"data.path={config.path}: {len(content)} bytes: expected at least {at_least}, one sample and its successor"
        )
    return torch.frombuffer(content, dtype=torch.uint8)
