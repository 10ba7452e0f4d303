"""What is said of a user's own model or data before anything starts: one line, with the layer and a way out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.compose import compose_grid
from pipebench.config import CustomConfig, CustomDataConfig, RunConfig
from pipebench.errors import ConfigError
from pipebench.harness.jobs import VetJob, Vetted
from pipebench.harness.launch import Progress
from pipebench.harness.vet import vet
from pipebench.models import layer_sequence

HEADER = "import torch\nfrom torch import nn\n"

DATA = """
def data(step, batch, seed):
    generator = torch.Generator().manual_seed(seed + step)
    return torch.randn(batch, 6, generator=generator), torch.randint(3, (batch,), generator=generator)
"""

GOOD = """
def model(width=4):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
"""

Look = Callable[..., Vetted]


class Silent:
    """What a worker reports to."""

    def __call__(self, progress: Progress) -> None:
        pass


@pytest.fixture(scope="module")
def point() -> RunConfig:
    grid = compose_grid(["batch=5", "micro=2"])
    assert grid is not None
    return grid.points[0]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, point: RunConfig) -> Look:
    """Vet a file of the user's, under a module name that no other test has."""
    monkeypatch.syspath_prepend(tmp_path)
    module = f"own_{abs(hash(request.node.nodeid))}"

    def vetted(text: str, arguments: dict[str, int] | None = None, loss: str = "cross_entropy") -> Vetted:
        (tmp_path / f"{module}.py").write_text(HEADER + text)
        model = CustomConfig(
            name="custom", target=f"{module}:model", arguments=arguments or {}, loss=loss.replace("mine", module)
        )
        config = replace(point, model=model, data=CustomDataConfig(name="custom", target=f"{module}:data"))
        found = vet(VetJob(config), Silent())  # type: ignore[arg-type]
        told = found.refusal.replace(str(tmp_path), "FOLDER").replace(module, "mine")
        return Vetted(found.model, found.data, told)

    return vetted


def test_a_model_that_can_be_cut_is_counted_and_named_by_its_file(look: Look) -> None:
    found = look(GOOD + DATA)
    assert found.refusal == ""
    assert found.model.num_layers == 3
    assert found.model.source == found.data.source != ""
    assert look("# edited\n" + GOOD + DATA).model.source != found.model.source


def test_a_file_that_is_edited_while_its_sweep_runs_fails_its_points(look: Look) -> None:
    found = look(GOOD + DATA)
    layer_sequence(found.model)
    look("# edited\n" + GOOD + DATA)
    with pytest.raises(ConfigError, match="its file was edited after the sweep began: start it again"):
        layer_sequence(found.model)


def test_arguments_reach_the_function(look: Look) -> None:
    text = "def model(depth):\n    return [nn.Linear(6, 6) for _ in range(depth)]\n" + DATA
    assert look(text, {"depth": 7}).model.num_layers == 7


def test_stashes_pops_ties_and_tuples_pass(look: Look) -> None:
    text = """
class Down(nn.Linear):
    stashes = ("x",)
    ties = {"weight": "both"}
    def forward(self, x):
        return (super().forward(x), x > 0), x
class Up(nn.Linear):
    pops = ("x",)
    ties = {"weight": "both"}
    def forward(self, values, x):
        return super().forward(values[0] * values[1] + x)
def model():
    down, up = Down(6, 6), Up(6, 6)
    up.weight = down.weight
    return [down, up]
"""
    assert look(text + DATA).refusal == ""


def test_a_layer_that_needs_numbers_to_be_built_is_let_have_them(look: Look) -> None:
    text = """
def model():
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    return [nn.Linear(6, 6), *map(nn.Dropout, rates)]
"""
    assert look(text + DATA).refusal == ""


def layers(body: str, call: str = "Mine()") -> str:
    return (
        f"\nclass Mine(nn.Module):\n    def forward(self, x):\n{body}\n"
        f"def model():\n    return [nn.Linear(6, 6), {call}]\n"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            layers("        return {'x': x}"),
            "layer 1 (Mine) returns a dict: expected a tensor or a flat tuple of tensors; wrap it in a module whose "
            "forward returns those of its tensors that the next layer takes",
        ),
        (layers("        return x, None"), "layer 1 (Mine) returns a tuple of (2, 6) float32, a NoneType: expected "),
        (
            layers("        return x[x > 0]"),
            "layer 1 (Mine) has shapes or branches that depend on data, or makes tensors on another device ",
        ),
        (
            layers("        return x + torch.ones(6)"),
            "layer 1 (Mine) has shapes or branches that depend on data, or makes tensors on another device ",
        ),
        (layers("        return x", "nn.Linear(5, 6)"), "layer 1 (Linear) cannot take (2, 6) float32, which is all "),
        (
            layers("        return x.relu_()"),
            "layer 1 (Mine) changes its input in place, which a recompute needs again: expected inplace=False, or one "
            "nn.Sequential of it and the layer before it",
        ),
        (
            layers("        return x.sum(0, keepdim=True)"),
            "layer 1 (Mine) returns (1, 6) float32 for 2 samples: expected the samples first, also in what it stashes",
        ),
        (
            "\ndef model():\n    same = nn.Linear(6, 6)\n    return nn.Sequential(same, nn.ReLU(), same)\n",
            "layer 2 (Linear): its 'weight' is 'weight' of layer 0 (Linear) as well: expected ties = {'weight': "
            "'a name'} on the one and {'weight': 'a name'} on the other, or a layer of its own",
        ),
        (
            "\nclass Up(nn.Linear):\n    pops = ('x',)\ndef model():\n    return [Up(6, 6)]\n",
            "layer 0 (Up) pops 'x': expected an earlier layer that stashes it",
        ),
        (
            "\nclass Down(nn.Linear):\n    stashes = ('x',)\nclass Up(nn.Linear):\n    pops = ('x',)\n"
            "def model():\n    return [Down(6, 6), Up(6, 6)]\n",
            "layer 0 (Down) returns (2, 6) float32: expected a tuple of its value and of a tensor for each of "
            "stashes=('x',)",
        ),
        (
            "\ndef model():\n    return nn.Linear(6, 3)\n",
            "model.target=mine:model: returned a Linear: expected an nn.Sequential, or a list of layers, each called "
            "with what the one before it returned",
        ),
        ("\ndef model():\n    return [torch.relu]\n", "model.target=mine:model: item 0 is a builtin_function"),
        ("\ndef model():\n    return [nn.LazyLinear(3)]\n", "layer 0 (LazyLinear) has parameters without a shape: exp"),
        ("\ndef model():\n    return []\n", "model.target=mine:model: returned no layers: expected "),
        ("\ndef model():\n    raise KeyError('x')\n",
         "model.target=mine:model: model() raised KeyError: 'x' (mine.py, line "),
        ("\ndef model(width):\n    pass\n", "model.arguments={}: missing a required argument: 'width': expected those"),
        ("\ndef modle():\n    pass\n", "model.target=mine:model: FOLDER/mine.py has no 'model' (did you mean"),
        ("\nimport nowhere\n", "model.target=mine:model: importing mine raised ModuleNotFoundError: No module named"),
        ("\ndef model(:\n", "model.target=mine:model: importing mine raised SyntaxError: "),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_cut_is_refused(look: Look, text: str, line: str) -> None:
    refusal = look(text + DATA).refusal
    assert refusal.startswith(line)
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "\ndef data(step, batch, seed):\n    return torch.randn(batch, 6), torch.zeros(batch).long()\n",
            "data.target=mine:data: other inputs when asked for step 0 again: expected numbers that depend on step and "
            "seed alone, from torch.Generator().manual_seed(seed + step)",
        ),
        (
            "\ndef data(step, batch, seed):\n    return torch.zeros(batch, 6)\n",
            "data.target=mine:data: returned (5, 6) float32: expected (inputs, targets), each a tensor or a tuple",
        ),
        (
            "\ndef data(step, batch, seed):\n    return torch.zeros(6, batch), torch.zeros(batch).long()\n",
            "data.target=mine:data: inputs are (6, 5) float32: expected batch=5 samples first",
        ),
        (
            "\ndef data(step, batch, seed):\n    return torch.zeros(batch, 6), torch.zeros(batch, 2)\n",
            "model.loss=cross_entropy cannot take what the last layer returns, (2, 3) float32, with targets (2, 2) ",
        ),
        (
            "\ndef data(step, batch):\n    pass\n",
            "data.arguments={}: too many positional arguments: expected those of data(step, batch)",
        ),
    ],
)  # fmt: skip
def test_data_that_no_model_can_learn_from_are_refused(look: Look, text: str, line: str) -> None:
    refusal = look(GOOD + text).refusal
    assert refusal.startswith(line)
    assert "\n" not in refusal


def test_a_loss_that_is_no_mean_would_depend_on_the_number_of_micro_batches(look: Look) -> None:
    added_up = "\ndef loss(output, target):\n    return nn.functional.cross_entropy(output, target, reduction='sum')\n"
    told = look(GOOD + added_up + DATA, loss="mine:loss").refusal
    assert "model.loss=mine:loss is " in told
    assert "expected a mean over the samples, or a function with an attribute count(targets): over how many" in told


def test_a_loss_of_ones_own_is_one_number(look: Look) -> None:
    text = "\ndef loss(output, target):\n    return nn.functional.cross_entropy(output, target, reduction='none')\n"
    refusal = look(GOOD + DATA + text, loss="mine:loss").refusal
    assert refusal == "model.loss=mine:loss returns (2,) float32: expected one number, the mean over the samples"


def test_a_module_that_is_nowhere_is_told_where_it_is_looked_for(look: Look) -> None:
    assert look(GOOD + DATA, loss="no.where:loss").refusal == (
        "model.loss=no.where:loss: no module 'no': expected no/where.py in this folder, in that of --config-dir, or "
        "installed"
    )
