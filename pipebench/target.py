"""Users' own functions, named in a config as `package.module:function`: found, called, and what can go wrong told.

Every error is a ConfigError of one line with the key, since what fails here is the user's file or its name. Nothing of
torch: what a function makes is for its caller to judge.
"""

import hashlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pipebench.config import closest
from pipebench.errors import ConfigError, first_line

Function = Callable[..., Any]


def look_beside(folder: str | None) -> None:
    """Let users' files be found in the current folder and in `folder`, after all that is installed.

    Workers are given this process's import path when they start.
    """
    for place in (Path.cwd(), *([Path(folder).resolve()] if folder else [])):
        if str(place) not in sys.path:
            sys.path.append(str(place))


def load(key: str, target: str) -> Function:
    """Import the function that `key=target` names."""
    module_name, _, name = target.partition(":")
    module = _imported(f"{key}={target}", module_name)
    place = getattr(module, "__file__", None) or module_name
    if not hasattr(module, name):
        known = [other for other in vars(module) if not other.startswith("_")]
        raise ConfigError(f"{key}={target}: {place} has no {name!r}{closest(name, known)}")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{key}={target}: expected a function, and {name!r} is of type {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def call(group: str, target: str, positional: tuple[Any, ...], arguments: Mapping[str, Any]) -> Any:
    """Return what the function of `{group}.target` makes of its arguments."""
    function, name = load(f"{group}.target", target), target.partition(":")[2]
    with_keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    try:
        signature = inspect.signature(function)
    except ValueError:  # some written in C do not say
        signature = None
    if signature is not None:
        try:
            signature.bind(*positional, **arguments)
        except TypeError as error:
            raise ConfigError(
                f"{group}.arguments={{{with_keywords}}}: {error}: expected those of {name}{_shown(signature)}"
            ) from error
    try:
        return function(*positional, **arguments)
    except (Exception, SystemExit) as error:
        called = ", ".join(filter(None, [*map(repr, positional), with_keywords]))
        raise ConfigError(f"{group}.target={target}: {name}({called}) raised {told(error)}") from error


def source_of(key: str, target: str) -> str:
    """Return a hash of the file that `target` is in; "" where it is in none."""
    load(key, target)
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else ""


def check_unedited(key: str, target: str, source: str) -> None:
    """Raise ConfigError where the file was edited since its hash became part of a point's name; "" is no name yet."""
    if source and source_of(key, target) != source:
        raise ConfigError(f"{key}={target}: its file was edited after the sweep began: start it again")


def told(error: BaseException) -> str:
    """Return an error's type and first line, and the last line of a user's file on the way to it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_USERS)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"


_NOT_USERS = ("<frozen", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent))
"""Where files lie that are no user's: Python's, installed ones, and ours."""


def _imported(written: str, module_name: str) -> object:
    sys.dont_write_bytecode = True  # what only looks, such as a dry run, leaves nothing beside a user's file
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            _fail_to_find(written, module_name, error)
        raise ConfigError(f"{written}: importing {module_name} raised {told(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{written}: importing {module_name} raised {told(error)}") from error


def _fail_to_find(written: str, module_name: str, error: ModuleNotFoundError) -> NoReturn:
    file = module_name.replace(".", "/") + ".py"
    raise ConfigError(
        f"{written}: no module {error.name!r}: expected {file} in this folder, in that of --config-dir, or installed"
    ) from error


def _shown(signature: inspect.Signature) -> str:
    """Return the parameters without their types, which can be long."""
    bare = [entry.replace(annotation=entry.empty) for entry in signature.parameters.values()]
    return str(inspect.Signature(bare))
