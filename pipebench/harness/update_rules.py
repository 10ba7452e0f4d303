"""What a rank's updates share with other ranks: parameters tied across them, and the sums that all must agree on."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from pipebench.config import RunConfig
from pipebench.engine.group import Alone, Group, ProcessGroups, Ranks
from pipebench.engine.update import Tied, UpdateRules
from pipebench.errors import ConfigError
from pipebench.models.layers import Layout, Tie


def update_rules(
    config: RunConfig,
    layout: Layout,
    owners: Sequence[int],
    rank: int,
    layers: Mapping[int, nn.Module],
    carrier: torch.device,
) -> UpdateRules:
    """Return the rules of a rank that holds `layers`; all ranks call this. `owners[i]` is the rank of layer i.

    Other engines than the built-in one update by themselves: raise ConfigError where a tie would ask them for a sum.
    """
    ties = _ties_across(layout, owners)
    if config.engine != "pipebench":
        if ties:
            tie, ranks = ties[0]
            raise ConfigError(
                f"engine={config.engine}: {tie.name!r} is tied across ranks {', '.join(map(str, ranks))}: "
                "expected engine=pipebench, which sums its gradients"
            )
        return UpdateRules(config.optimizer, 0, 1, (), Alone())
    num_ranks = max(owners) + 1
    group = _group(config, ties, num_ranks, carrier)
    return UpdateRules(config.optimizer, rank, num_ranks, tied_on(rank, layout, owners, layers), group)


def tied_on(rank: int, layout: Layout, owners: Sequence[int], layers: Mapping[int, nn.Module]) -> tuple[Tied, ...]:
    """Return what a rank that holds `layers` trains copies of, in an order that is the same on all ranks."""
    ties = [(tie, ranks) for tie, ranks in _ties_across(layout, owners) if rank in ranks]
    tied = (Tied(_copy_of(tie, layers), ranks) for tie, ranks in ties)
    return tuple(each for each in tied if each.parameter.requires_grad)


def _ties_across(layout: Layout, owners: Sequence[int]) -> list[tuple[Tie, Ranks]]:
    """Return the ties that several ranks have copies of, and which ranks those are."""
    ranks_of = [(tie, tuple(sorted({owners[layer] for layer, _ in tie.places}))) for tie in layout.ties]
    return [(tie, ranks) for tie, ranks in ranks_of if len(ranks) > 1]


def _group(config: RunConfig, ties: Sequence[tuple[Tie, Ranks]], num_ranks: int, carrier: torch.device) -> Group:
    sets = {ranks for _, ranks in ties}
    if config.optimizer.clip_norm is not None or config.optimizer.loss_scale is not None:
        sets.add(tuple(range(num_ranks)))
    return ProcessGroups(sets, carrier) if num_ranks > 1 else Alone()


def _copy_of(tie: Tie, layers: Mapping[int, nn.Module]) -> nn.Parameter:
    layer, name = next((layer, name) for layer, name in tie.places if layer in layers)
    return layers[layer].get_parameter(name)
