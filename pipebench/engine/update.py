"""From a rank's last gradient to its optimizers: what all ranks have to agree on before any of them may step.

Tied gradients are summed over the ranks that hold copies, one norm is taken over all parameters of all ranks, and from
that norm alone every rank decides alike whether gradients overflowed and by how much they are scaled down. Where none
of this is asked for, nothing is exchanged.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipebench.config import OptimizerConfig
from pipebench.engine.group import Group, Ranks
from pipebench.learning_rate import lr_at
from pipebench.record import UpdateRecord

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000
"""Where a dynamic loss scale begins, and after how many good updates it doubles: torch.amp.GradScaler's own."""


LARGEST_SCALE = 2.0**127
"""Twice as much is no fp32 number."""


@dataclass(frozen=True, slots=True)
class Tied:
    """This rank's copy of a parameter of which all of `ranks` have one."""

    parameter: nn.Parameter
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """How gradients become an update: the settings, and what this rank shares with whom through `group`."""

    config: OptimizerConfig
    rank: int
    num_ranks: int
    tied: tuple[Tied, ...]
    group: Group


@dataclass(slots=True)
class LossScale:
    """The factor on the loss in a backward. A dynamic one halves at an overflow and grows after many good updates."""

    value: float
    dynamic: bool
    num_good: int = 0

    def learn(self, overflowed: bool) -> None:
        if not self.dynamic:
            return
        self.num_good = 0 if overflowed else self.num_good + 1
        if overflowed:
            self.value /= 2
        elif self.num_good == GROWTH_INTERVAL:
            self.value, self.num_good = min(self.value * 2, LARGEST_SCALE), 0


class Update:
    """One rank's part in the updates of all ranks. `stages` are the rank's own parameters by the stage's number."""

    def __init__(
        self, rules: UpdateRules, stages: Mapping[int, Sequence[nn.Parameter]], make_optimizer: MakeOptimizer
    ) -> None:
        owned = owned_parameters(stages)
        self.optimizers = {stage: make_optimizer(own) for stage, own in owned.items() if own}
        scale = rules.config.loss_scale
        dynamic = scale == "dynamic"
        self.loss_scale = None if scale is None else LossScale(FIRST_SCALE if dynamic else float(scale), dynamic)
        self.done: UpdateRecord | None = None
        self._rules = rules
        self._all_ranks = tuple(range(rules.num_ranks))
        self._parameters = [parameter for own in owned.values() for parameter in own]
        elsewhere = {tied.parameter for tied in rules.tied if tied.ranks[0] != rules.rank}
        self._counted = [parameter for parameter in self._parameters if parameter not in elsewhere]
        self._takes_norm = rules.config.clip_norm is not None or scale is not None
        self._shares = len(self._parameters) < sum(len(trained(own)) for own in stages.values())
        self._step, self._prepared = 0, False

    @property
    def needs_every_backward(self) -> bool:
        """Tell whether no stage of this rank may update before all its stages, or all ranks, have their gradients."""
        return self._takes_norm or self._shares or bool(self._rules.tied)

    @property
    def loss_factor(self) -> float:
        """Return what a mini-batch's mean loss is multiplied with in its backward."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        return scale / self._rules.config.accumulate

    def begin(self, step: int) -> None:
        """Begin the step of mini-batch number `step`, the first being 0."""
        self._step, self._prepared, self.done = step, False, None

    def prepare(self) -> None:
        """Make the gradients those to update with; every rank calls this before a step's first optimizer.

        The ranks wait for one another here where they have to agree. Calling it again in the same step does nothing.
        """
        config = self._rules.config
        if self._prepared or not self._is_due():
            return
        self._prepared = True
        for tied in self._rules.tied:
            self._rules.group.add_up(_gradient(tied.parameter), tied.ranks)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        norm = self._norm() / scale if self._takes_norm else None
        overflowed = self.loss_scale is not None and norm is not None and not math.isfinite(norm)
        if norm is not None and not overflowed:
            self._multiply_gradients(_clip_factor(norm, config.clip_norm) / scale)
        rate = lr_at(config, self._step // config.accumulate)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.done = UpdateRecord(rate, norm, None if self.loss_scale is None else scale, overflowed)
        if self.loss_scale is not None:
            self.loss_scale.learn(overflowed)

    def step(self, stage: int) -> None:
        """Step a stage's optimizer and drop the gradients, or only drop them, or leave them for the next mini-batch."""
        optimizer = self.optimizers.get(stage)
        if optimizer is None or self.done is None:
            return
        if not self.done.skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def summed_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the whole gradient of each parameter that other ranks have copies of; all of them call this."""
        summed = {tied.parameter: _gradient(tied.parameter).clone() for tied in self._rules.tied}
        for tied in self._rules.tied:
            self._rules.group.add_up(summed[tied.parameter], tied.ranks)
        return summed

    def _is_due(self) -> bool:
        return (self._step + 1) % self._rules.config.accumulate == 0

    def _norm(self) -> float:
        """Return the Euclidean norm of all gradients of all ranks, what is tied counted once; the same on each."""
        gradients = [parameter.grad for parameter in self._counted if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        squares = torch.stack(norms).square().sum().reshape(1) if norms else torch.zeros(1, dtype=torch.float64)
        if len(self._all_ranks) > 1:
            self._rules.group.add_up(squares, self._all_ranks)
        return math.sqrt(float(squares))

    def _multiply_gradients(self, factor: float) -> None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)


def probe_scale(config: OptimizerConfig) -> float:
    """Return the factor on gradients that are looked at and never updated with.

    Where a loss is scaled, gradients would vanish without; one too small to overflow serves, since nobody adapts it.
    """
    scale = FIRST_SCALE if config.loss_scale == "dynamic" else config.loss_scale
    return 1.0 if scale is None else min(2.0**10, float(scale))


def trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that need a gradient."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def owned_parameters(stages: Mapping[int, Iterable[nn.Parameter]]) -> dict[int, list[nn.Parameter]]:
    """Return what each stage's optimizer trains; a parameter that several stages share is the first one's."""
    seen: set[nn.Parameter] = set()
    owned = {}
    for stage, parameters in stages.items():
        owned[stage] = [parameter for parameter in trained(parameters) if parameter not in seen]
        seen.update(owned[stage])
    return owned


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient, zeros put in place where it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _clip_factor(norm: float, clip_norm: float | None) -> float:
    """Return torch.nn.utils.clip_grad_norm_'s factor."""
    if clip_norm is None:
        return 1.0
    factor = clip_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor  # not-a-number stays what it is
