"""The backward in two parts, against plain PyTorch: models with linear layers, without any, and users' own."""

import pytest
import torch
from plain import MODELS, SEED, assert_close, build, gradients, mini_batch, parameters, plain_backward
from ranks import CPU, Point, run
from torch import Tensor, nn
from torch.nn import functional

from pipebench.engine.backward import AutogradSplit, QueuedBackward, WholeBackward, run_whole
from pipebench.engine.stage import Loss, Stage
from pipebench.linear import Linear
from pipebench.schedule.action import Action, Schedule
from pipebench.schedule.builders import Recompute

WIDTH = 16

every_recompute = pytest.mark.parametrize(
    "recompute",
    [setting for setting in Recompute if setting != Recompute.SELECTIVE],  # nothing here has attention scores
    ids=lambda recompute: recompute.value,
)


def split_stage(*layers: nn.Module) -> Stage:
    return Stage(layers, 0, SEED, CPU, loss=Loss(functional.mse_loss), splits_backward=True)


def twin(*layers: nn.Module) -> list[nn.Module]:
    """Return untouched layers with the same weights."""
    copies = []
    for layer in layers:
        copies.append(type(layer)(*layer.arguments) if hasattr(layer, "arguments") else nn.Linear(WIDTH, WIDTH))
        copies[-1].load_state_dict(layer.state_dict())
    return copies


def in_two_parts(stage: Stage, x: Tensor, gradient: Tensor) -> Tensor | None:
    """Run forward, the input's part and then the weights' part; return the input's gradient."""
    output = stage.forward(x, 0, 0)
    put_off = stage.backward.of_input([stage.backward.root_of(output)], [x], [gradient])
    stage.backward.of_weights(put_off)
    return x.grad


class Mixed(nn.Module):
    """A layer of a user's own: a plain nn.Linear with a frozen bias, a norm, and a weight used by hand."""

    arguments = ()

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.bias.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.by_hand = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(torch.tanh(self.norm(self.first(x)))) @ self.by_hand
        return x + y + functional.linear(x, self.first.weight)


class Convolution(nn.Module):
    """A residual block without a linear layer."""

    arguments = ()

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv1d(4, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.first(x.unsqueeze(1))))
        return x * self.scale + self.second(hidden).squeeze(1)


class Viewing(nn.Module):
    """A layer whose output is a view."""

    arguments = ()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).t().contiguous().t()


@pytest.mark.parametrize("make", [Mixed, Convolution, Viewing])
def test_both_parts_together_give_the_gradients_of_autograd(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layers = [make(), make()]
    plain = twin(*layers)
    stage = split_stage(*layers)
    x, gradient = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    own, theirs = (x.clone().requires_grad_() for _ in range(2))
    of_input = in_two_parts(stage, own, gradient)
    nn.Sequential(*plain)(theirs).backward(gradient)
    assert of_input is not None
    torch.testing.assert_close(of_input, theirs.grad)
    for layer, other in zip(layers, plain, strict=True):
        for (name, parameter), expected in zip(layer.named_parameters(), other.parameters(), strict=True):
            if expected.grad is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(parameter.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_each_stage_takes_the_cheapest_way_that_is_right_for_it() -> None:
    assert isinstance(split_stage(Mixed()).backward, QueuedBackward)
    assert isinstance(split_stage(nn.Linear(WIDTH, WIDTH)).backward, QueuedBackward)
    assert isinstance(split_stage(Convolution()).backward, AutogradSplit)
    assert isinstance(Stage([Mixed()], 0, SEED, CPU).backward, WholeBackward)


def test_only_the_weights_of_linear_layers_wait() -> None:
    layer = Mixed()
    stage = split_stage(layer)
    x = torch.randn(3, WIDTH).requires_grad_()
    output = stage.forward(x, 0, 0)
    used_by_hand_as_well = layer.first.weight
    put_off = stage.backward.of_input([stage.backward.root_of(output)], [x], [torch.ones(3, WIDTH)])
    before = used_by_hand_as_well.grad.clone()
    assert layer.norm.weight.grad is not None
    assert layer.by_hand.grad is not None
    assert [product.linear for product in put_off] == [layer.first]  # the frozen one has nothing to wait for
    stage.backward.of_weights(put_off)
    assert not put_off
    assert not torch.equal(used_by_hand_as_well.grad, before)


def test_a_stage_that_splits_may_also_run_whole_backwards() -> None:
    layer = Linear(WIDTH, WIDTH)
    [plain] = twin(layer)
    stage = split_stage(layer)
    x = torch.randn(3, WIDTH)
    run_whole([stage.backward.root_of(stage.forward(x, 0, 0))], [torch.ones(3, WIDTH)])
    plain(x).backward(torch.ones(3, WIDTH))
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


def test_a_subclass_of_the_plain_linear_layer_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer = Doubled(WIDTH, WIDTH)
    stage = split_stage(layer)
    assert type(layer) is Doubled
    x = torch.randn(3, WIDTH).requires_grad_()
    in_two_parts(stage, x, torch.ones(3, WIDTH))
    torch.testing.assert_close(layer.weight.grad, 2 * x.detach().sum(0).expand(WIDTH, WIDTH))


@pytest.mark.parametrize(
    "normed", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_linear_layer_whose_weight_is_computed_keeps_its_gradients(normed: object) -> None:
    torch.manual_seed(0)
    layer, plain = (normed(nn.Linear(WIDTH, WIDTH)).eval() for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    x, gradient = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    in_two_parts(split_stage(layer), x.clone().requires_grad_(), gradient)
    plain(x).backward(gradient)
    for (name, parameter), expected in zip(layer.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_no_more_is_kept_for_the_weights_part_than_input_and_gradient_of_each_linear_layer() -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.5)) for _ in range(3)]
    stage = split_stage(*layers)
    kept: list[object] = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.alive = type("Alive", (), {"__del__": lambda self: kept.append(self)})()
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            return gradient

    x = torch.randn(3, WIDTH).requires_grad_()
    root = stage.backward.root_of(Counted.apply(stage.forward(x, 0, 0)))
    put_off = stage.backward.of_input([root], [x], [torch.ones(3, WIDTH)])
    del root
    assert len(kept) == 1, "the graph outlives the input's part"
    assert [(p.x.shape, p.gradient.shape) for p in put_off] == [((3, WIDTH), (3, WIDTH))] * 3


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v"])
@every_recompute
def test_stages_without_linear_layers_equal_plain_pytorch(name: str, recompute: Recompute) -> None:
    def prepare(layers: list[nn.Module]) -> None:
        torch.manual_seed(3)
        layers[1:-1] = [Convolution(), nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.ReLU()), nn.LayerNorm(WIDTH)]
        layers[2] = Convolution()
        layers.insert(3, Convolution())

    layers, loss_of = build(MODELS["mlp"])
    prepare(layers)
    loss = plain_backward(layers, loss_of, mini_batch(MODELS["mlp"]), 5)
    outcome = run(Point(MODELS["mlp"], name, recompute, 3, 5), prepare=prepare)
    assert_close(gradients(outcome.layers), gradients(layers))
    assert outcome.losses == [pytest.approx(loss, rel=1e-6)]


@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_a_recomputed_micro_batch_runs_its_forward_once_more_and_not_once_per_part(name: str) -> None:
    calls: dict[int, int] = {}

    def count(layers: list[nn.Module]) -> None:
        for index, layer in enumerate(layers):

            def note(layer: nn.Module, inputs: tuple[Tensor], index: int = index) -> None:
                if not inputs[0].is_meta:
                    calls[index] = calls.get(index, 0) + 1

            layer.register_forward_pre_hook(note)

    for recompute, expected in [(Recompute.NEVER, 4), (Recompute.ALWAYS, 8)]:
        calls.clear()
        run(Point(MODELS["mlp"], name, recompute, 2, 4), prepare=count)
        assert set(calls.values()) == {expected}


@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_optimizer_sees_the_gradient_norm_of_the_whole_backward(num_stages: int) -> None:
    class Clipping(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            parameters = [p for group in self.param_groups for p in group["params"]]
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.01)))
            super().step()

    results = []
    for schedule in ("zb_h1", "gpipe"):
        norms: list[float] = []
        outcome = run(
            Point(MODELS["mlp"], schedule, num_stages=num_stages, num_micro_batches=4),
            num_steps=2,
            train=True,
            make_optimizer=lambda own: Clipping(own, lr=0.1),
        )
        results.append((sorted(norms), parameters(outcome.layers)))
    (split_norms, split), (whole_norms, whole) = results
    assert len(split_norms) == 2 * num_stages
    assert split_norms == pytest.approx(whole_norms, rel=1e-5)
    assert_close(split, whole)


@pytest.mark.parametrize("model", list(MODELS))
def test_bf16_equals_plain_pytorch_under_autocast(model: str) -> None:
    layers, loss_of = build(MODELS[model])
    loss = plain_backward(layers, loss_of, mini_batch(MODELS[model]), 3, autocast=torch.bfloat16)
    outcome = run(Point(MODELS[model], "zb_h1", Recompute.EXCEPT_LAST, 3, autocast=torch.bfloat16))
    assert_close(gradients(outcome.layers), gradients(layers), within=1e-2)
    assert outcome.losses == [pytest.approx(loss, rel=1e-3)]


def test_parts_may_lie_any_number_of_micro_batches_apart() -> None:
    rows = [
        "0F0 0F1 0F2 0B0 0I1 0I2 0W2 0W1",
        "1F0 1B0 1F1 1I1 1F2 1I2 1W1 1W2",
    ]
    schedule = Schedule("by hand", [[Action.parse(word) for word in row.split()] for row in rows])
    layers, loss_of = build(MODELS["transformer"])
    plain_backward(layers, loss_of, mini_batch(MODELS["transformer"]), 3)
    outcome = run(Point(MODELS["transformer"], rows=schedule))
    assert_close(gradients(outcome.layers), gradients(layers))
