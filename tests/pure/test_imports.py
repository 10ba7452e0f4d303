"""Imports go downward only, and what answers a user at once imports nothing slow."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pipebench"

LAYERS = [
    ["errors"],
    [
        "seeds",
        "machine",
        "interrupts",
        "temporary",
        "conditions",
        "files",
        "schedule",
        "trace",
        "linear",
        "values",
        "layer",
    ],
    [
        *("config", "target", "compose", "learning_rate", "record", "saved", "metrics", "activations", "costs", "rows"),
        *("grid", "ledger", "rounding", "render"),
    ],
    ["models", "data", "engine"],
    ["peers"],
    ["harness"],
    ["display", "report", "tracking"],
    ["dry_run"],
    ["perf", "compare", "cli", "push", "dashboard"],
    ["__main__"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

COMMANDS = {"pipebench.schedule.__main__": "cli"}
"""Modules that answer a command of their own, and so lie higher than the part whose folder they stand in."""

STRANGERS = {("models", "engine"), ("engine", "models"), ("models", "data"), ("data", "models"), ("data", "engine"),
             ("engine", "data"), ("report", "tracking"), ("tracking", "report")}  # fmt: skip
"""Parts of one level that must not know each other."""

ALLOWED = {("pipebench.engine.pipeline", "pipebench.data.batch")}
"""The one type that data give and engines take."""

WITHOUT_TORCH = ["errors", "seeds", "machine", "interrupts", "temporary", "conditions", "files", "schedule", "trace",
                 "config", "target", "compose", "learning_rate", "record", "saved", "metrics", "activations", "costs",
                 "ledger", "rows", "grid", "rounding", "render", "display", "report", "tracking", "dry_run", "perf",
                 "compare", "cli", "push", "dashboard", "__main__"]  # fmt: skip
TORCHLESS_MODULES_OF_TORCH_PARTS = [
    "pipebench.engine.budget",
    "pipebench.engine.partition",
    "pipebench.engine.microbatch",
    "pipebench.engine.whereabouts",
    "pipebench.peers.abilities",
    "pipebench.harness.admit",
    "pipebench.harness.failures",
    "pipebench.harness.hang",
    "pipebench.harness.forecast",
    "pipebench.harness.jobs",
    "pipebench.harness.launch",
    "pipebench.harness.limits",
    "pipebench.harness.orphans",
    "pipebench.harness.prepare",
    "pipebench.harness.resume",
    "pipebench.harness.simulated",
    "pipebench.harness.sweep",
]

SLOW = {"torch", "wandb", "wandb_workspaces", "tensorboard", "pandas", "seaborn", "matplotlib", "PIL"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(module: str) -> str:
    return COMMANDS.get(module) or module.split(".")[1]


@cache
def imports(module: str, *, at_import_only: bool) -> set[str]:
    """Return the modules that `module` names in imports, packages it enters on the way included.

    `at_import_only` leaves out what stands inside functions or under `if TYPE_CHECKING`.
    """
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while nodes:
        node = nodes.pop()
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if at_import_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            found.update(inner or {node.module})
        nodes.extend(ast.iter_child_nodes(node))
    parents = {".".join(name.split(".")[:end]) for name in found for end in range(1, name.count(".") + 1)}
    return found | parents if at_import_only else found


def loaded_by(module: str) -> set[str]:
    """Return everything that importing `module` imports, our modules followed."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(imports(name, at_import_only=True) if name in MODULES else ())
    return seen


def test_every_part_has_a_level() -> None:
    assert {part_of(module) for module in MODULES if "." in module} <= set(LEVEL)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"pipebench"}))
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    for other in sorted(imports(module, at_import_only=False)):
        if not other.startswith("pipebench.") or (module, other) in ALLOWED:
            continue
        here, there = part_of(module), part_of(other)
        assert LEVEL[there] <= LEVEL[here], f"{module} imports {other}, which lies above it"
        assert (here, there) not in STRANGERS, f"{module} imports {other}: these must not know each other"


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = {module: imports(module, at_import_only=False) & set(MODULES) - {"pipebench"} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize(
    "module",
    [name for name in sorted(MODULES) if "." in name and part_of(name) in WITHOUT_TORCH]
    + TORCHLESS_MODULES_OF_TORCH_PARTS,
)
def test_importing_this_imports_nothing_slow(module: str) -> None:
    assert not {name.split(".")[0] for name in loaded_by(module)} & SLOW


def test_schedules_and_traces_need_the_standard_library_and_numpy_alone() -> None:
    for module in MODULES:
        if "." in module and part_of(module) in ("errors", "seeds", "schedule", "trace", "render"):
            for name in loaded_by(module):
                assert name.split(".")[0] in {*sys.stdlib_module_names, "pipebench", "numpy"}, f"{module} loads {name}"


def test_the_command_line_really_loads_nothing_slow() -> None:
    code = f"import sys, pipebench.cli; print(sorted({SLOW!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
