"""Turn a command line into points: Hydra composes, and does nothing else.

Hydra's own job runner would make folders, swallow errors and decide the exit code, so points are composed
through its compose API; only what Hydra answers by itself (--help, --cfg, --info) goes to its main.
"""

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipebench.config import (
    DATA,
    MODELS,
    NOT_PART_OF_THE_POINT,
    RunConfig,
    closest,
    is_free,
    is_known,
    known_keys,
)
from pipebench.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE.parent if (_PACKAGE.parent / "conf").is_dir() else _PACKAGE
CONF_DIR = _ROOT / "conf"
EXPERIMENTS_DIR = _ROOT / "experiments"
CONFIG_NAME = "config"


@dataclass(frozen=True, slots=True)
class Grid:
    """The points in the order asked for, the keys that vary, the experiment's name ("" for none), and --config-dir."""

    points: tuple[RunConfig, ...]
    swept: tuple[str, ...]
    experiment: str
    folder: str | None = None


def compose_grid(argv: Sequence[str]) -> Grid | None:
    """Return the points that `argv` asks for, or None when Hydra answered it (--help, --cfg, --info).

    The first swept key varies slowest. Raise ConfigError, one line, for whatever cannot be composed.
    """
    _register()
    arguments = _parse(argv)
    if arguments.config_dir and not Path(arguments.config_dir).is_dir():
        raise ConfigError(f"--config-dir {arguments.config_dir}: expected a folder that exists")
    overrides = [text for text in arguments.overrides if text != "experiment=null"]  # Hydra trips over writing it out
    if arguments.config_dir:
        overrides.append(f"hydra.searchpath=[{Path(arguments.config_dir).resolve().as_uri()}]")
    grid = None
    if not (arguments.help or arguments.hydra_help or arguments.info or arguments.shell_completion):
        with (
            _one_line_errors(overrides),
            hydra.initialize_config_dir(str(CONF_DIR), job_name="pipebench", version_base="1.3"),
        ):
            grid = dataclasses.replace(_expand(overrides, arguments.multirun), folder=arguments.config_dir)
    if grid is not None and not arguments.cfg:
        return grid
    hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=CONFIG_NAME)(lambda config: None)()
    return None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags with Hydra's own parser; -m may stand anywhere."""

    def fail(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --hydra-help lists the flags")

    parser = get_args_parser()
    parser.error = fail  # type: ignore[method-assign]
    return parser.parse_intermixed_args(argv)


def _expand(overrides: list[str], multirun: bool) -> Grid:
    parsed = [_parsed(text) for text in overrides]
    for override in parsed:
        _check_override(override, multirun)
    single = [text for text, o in zip(overrides, parsed, strict=True) if not o.is_sweep_override()]
    settings = hydra.compose(CONFIG_NAME, overrides=_freed(single), return_hydra_config=True).hydra
    experiment = settings.runtime.choices.experiment or ""
    params = dict(settings.sweeper.params or {})
    if params and not multirun:
        raise ConfigError(f"experiment={experiment}: sweeps {', '.join(params)}: expected -m on the command line")
    grids = _grids(experiment, params.pop(ONE_OF, None))
    common = [_parsed(f"{key}={value}") for key, value in params.items()]
    jobs = _jobs(common, grids, parsed)
    points = tuple(map(_point, jobs))
    swept = [axis for axis in (*common, *itertools.chain(*grids), *parsed) if axis.is_sweep_override()]
    told_apart = itertools.chain(*grids) if len(grids) > 1 else ()
    return Grid(points, tuple(dict.fromkeys(axis.get_key_element() for axis in (*swept, *told_apart))), experiment)


def _point(overrides: Sequence[str]) -> RunConfig:
    point = cast(RunConfig, OmegaConf.to_object(hydra.compose(CONFIG_NAME, overrides=_freed(overrides))))
    for text in filter(_adds, overrides):
        group = text.partition(".")[0]
        if "arguments" not in {entry.name for entry in dataclasses.fields(getattr(point, group))}:
            raise ConfigError(f"{text}: expected {group}=custom, whose arguments are yours to name")
    return point


def _freed(overrides: Sequence[str]) -> list[str]:
    """Let keys be added where users name them: Hydra wants `++` before each."""
    return [f"++{text}" if _adds(text) else text for text in overrides]


def _adds(text: str) -> bool:
    return is_free(text.partition("=")[0])


ONE_OF = "one_of"
"""Stands among an experiment's sweep parameters for a list of grids; each point is of one of them."""


def _grids(experiment: str, listed: Any) -> list[list[Override]]:
    """Return the axes of each grid of which a point takes one; a single grid without axes where none is listed."""
    if listed is None:
        return [[]]
    if not OmegaConf.is_list(listed) or not listed or not all(map(OmegaConf.is_dict, listed)):
        raise ConfigError(f"experiment={experiment}: {ONE_OF}={listed}: expected a list of grids, each KEY: VALUES")
    return [[_parsed(f"{key}={value}") for key, value in grid.items()] for grid in listed]


def _jobs(common: list[Override], grids: list[list[Override]], written: list[Override]) -> list[list[str]]:
    """Return what to compose for each point; what was written on the command line wins over an experiment's values.

    All grids follow one another for each combination of the other axes, so that what is to be compared is measured at
    about the same time.
    """
    keys_written = {axis.get_key_element() for axis in written}
    jobs: dict[tuple[str, ...], None] = {}  # a grid may set a common axis, and then meets itself again
    for combination in _combinations([*common, *written]):
        others = [_parsed(text) for text in combination]
        for grid in grids:
            free = [axis for axis in grid if axis.get_key_element() not in keys_written]
            jobs |= dict.fromkeys(map(tuple, _combinations([*others, *free])))
    return [list(job) for job in jobs]


def _combinations(axes: list[Override]) -> list[list[str]]:
    """Return every combination of the axes' values; of two axes with one key the second counts."""
    [combinations] = BasicSweeper.split_arguments(axes, max_batch_size=None)
    return combinations


def _parsed(text: str) -> Override:
    [override] = OverridesParser.create().parse_overrides([text])
    return override


def _register() -> None:
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for kind, schema in MODELS.items():
        store.store(group="model", name=f"{kind}_schema", node=schema)
    for kind, schema in DATA.items():
        store.store(group="data", name=f"{kind}_schema", node=schema)
    for path in sorted(EXPERIMENTS_DIR.glob("*.yaml")):
        store.store(group="experiment", name=path.stem, node=OmegaConf.load(path), package="_global_")


def _check_override(override: Override, multirun: bool) -> None:
    """Refuse keys that the schema lacks: Hydra would append `+microo=4` without a word."""
    text, key = str(override.input_line), override.key_or_group
    if key.startswith(("hydra.", "hydra/")):
        return
    known = [*known_keys(), "experiment"]
    if key != "experiment" and not is_known(key):
        raise ConfigError(f"{text}: unknown key {key!r}{closest(key, known)}; --help lists the keys")
    if override.is_add():
        raise ConfigError(f"{text}: expected {text.lstrip('+')}; the key is there already")
    if key in ("wandb",):
        raise ConfigError(f"{text}: expected one of {', '.join(k for k in known if k.startswith(key + '.'))}")
    if override.is_sweep_override() and key.partition(".")[0] in NOT_PART_OF_THE_POINT:
        raise ConfigError(f"{text}: expected one value; points cannot differ in {key} alone")
    if key == "experiment" and override.is_sweep_override():
        raise ConfigError(f"{text}: several experiments: expected one, since each brings its own sweep")
    if override.is_delete():
        raise ConfigError(f"{text}: expected KEY=VALUE; a key cannot be taken away")
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(f"{text}: expected values such as {key}=1,2,4 or {key}=range(1,5)")
    if override.is_sweep_override() and not multirun:
        raise ConfigError(f"{text}: several values: expected one, or -m on the command line")


@contextlib.contextmanager
def _one_line_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Say in one line what Hydra and OmegaConf spread over many."""
    try:
        yield
    except OverrideParseException as error:
        raise ConfigError(f"{error.override}: cannot be read: expected KEY=VALUE") from error
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = [option for option in error.options or () if not option.endswith("_schema")]
        raise ConfigError(
            f"{group or 'config'}={name}: expected one of {', '.join(options)}{closest(name, options)}"
        ) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        raise ConfigError(f"{_where(cause, overrides)}{_first_line(cause)}") from error


def _where(error: BaseException, overrides: Sequence[str]) -> str:
    key: Any = getattr(error, "full_key", None)
    written = [text for text in overrides if key and text.lstrip("+").startswith(f"{key}=")]
    return f"{written[-1]}: " if written else f"{key}: " if key else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    if "is not Optional" in text:
        return "expected a value, not null"
    if "to Dict[" in text:
        return "expected names with values, such as {width: 64}"
    if "ListConfig" in text:
        return "expected a list such as [wandb,tensorboard]"
    wanted = _WANTED.get(text.rpartition("could not be converted to ")[2])
    return f"expected {wanted}" if wanted else text


_WANTED = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
"""OmegaConf's names of types in its conversion errors, in the user's words."""
