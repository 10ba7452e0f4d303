"""What wandb may see of the environment: how to reach a server and where its own files go, and nothing else.

wandb takes any of its settings from a variable `WANDB_<SETTING>`. Inside `wandb agent`, or in a shell that has some
set, a run would get the id, name, notes or sweep of somebody else, and their values would land in its files. What a
run is called and filed under is the sweep's to say, so everything but a short list is hidden while wandb works.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

SEEN = frozenset({
    # who one is
    "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CREDENTIALS_FILE",
    # which server, and the way there
    "WANDB_BASE_URL", "WANDB_APP_URL", "WANDB_HTTP_PROXY", "WANDB_HTTPS_PROXY",
    "WANDB_X_EXTRA_HTTP_HEADERS", "WANDB_INSECURE_DISABLE_SSL", "WANDB_HTTP_TIMEOUT",
    # where wandb keeps its own files
    "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR",
    "WANDB_ERROR_REPORTING",
})  # fmt: skip
"""The variables of wandb that it sees. Proxies, certificates and the like of other names are never hidden."""


@contextlib.contextmanager
def wandb_environment() -> Iterator[None]:
    """Hide every variable of wandb's that is not in `SEEN`, and put all back as they were afterwards."""
    before = _variables_of_wandb()
    _forget(set(before) - SEEN)
    try:
        yield
    finally:
        _forget(set(_variables_of_wandb()))  # wandb notes in one how to reach its service
        os.environ.update(before)


@contextlib.contextmanager
def inside_sweep(folder: Path) -> Iterator[None]:
    """As `wandb_environment`, and set what wandb takes from variables only; the last two a user may have set otherwise.

    Tables wait for their upload in the data folder, which runs note by its path, and logs lie in the cache, by default
    both in the user's home: that would tear a sweep apart. Without the last, wandb may send reports of its own errors.
    """
    inside = folder / "wandb"
    usual = {"WANDB_CACHE_DIR": str(inside / "cache"), "WANDB_ERROR_REPORTING": "false"}
    with wandb_environment():
        os.environ["WANDB_DATA_DIR"] = str(inside)
        os.environ.update({name: value for name, value in usual.items() if name not in os.environ})
        raising, logging.raiseExceptions = logging.raiseExceptions, False  # a full disk: no traceback for each line
        try:
            yield
        finally:
            logging.raiseExceptions = raising


def _variables_of_wandb() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}


def _forget(names: set[str]) -> None:
    for name in names:
        del os.environ[name]
