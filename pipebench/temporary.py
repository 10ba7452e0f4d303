"""One folder for all that this process, and those it starts, put into the temporary folder.

The fork server's socket, tables on their way to W&B, its service's socket, torch's caches and what the ranks of a
point share: each cleans up behind itself when all goes well, none when it is killed. Here they lie in one folder, which
goes with the process. One that is killed leaves it to its fork server; whatever is left all the same is removed when
the next one starts, since nobody holds its lock any more.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TextIO

from pipebench.errors import ResultError
from pipebench.interrupts import held_back

PREFIX = "pipebench-"
_OWNER = "owner"
"""A file that the owner holds a lock on as long as it lives."""

_VARIABLE = "PIPEBENCH_TEMPORARY"
"""Tells those that the owner starts which folder is its own."""

_LONGEST = 107 - 32
"""Bytes of a folder's path, so that the sockets of multiprocessing have room below it: the kernel takes 107."""

_TRIES, _BETWEEN_TRIES_S = 20, 0.05

_AFTER_MULTIPROCESSING = -200
"""It removes its own folder at -100, and would complain that it is gone."""

_owned: dict[Path, TextIO] = {}


@contextlib.contextmanager
def private_temporary_folder() -> Iterator[None]:
    """Make temporary files of this process, and of those it starts meanwhile, in a folder of its own.

    The same one each time: modules keep what they once made there. It is removed when the process ends.
    Raise ResultError where none can be made.
    """
    try:
        with held_back():
            folder = next((folder for folder in _owned if folder.exists()), None) or _make()
    except OSError as error:
        raise ResultError(f"temporary folder (TMPDIR): cannot be written: {error}") from error
    temporary = tempfile.tempdir
    before = {name: os.environ.get(name) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", _VARIABLE)}
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ[_VARIABLE] = str(folder)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "torchinductor"))  # else named after the user
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def remove_own() -> None:
    """Remove this process's folder, whoever still writes there."""
    for folder in list(_owned):
        _remove(folder)
        _owned.pop(folder).close()


def remove_behind_owner() -> None:
    """Remove the folder of the process that started this one, unless that lives.

    Where the owner has removed it, some module may have made it anew, without the lock. One that is killed may still
    be closing its files in another thread when its children hear of it, so they ask for its lock more than once.
    """
    folder = Path(os.environ.get(_VARIABLE, ""))
    if not folder.name.startswith(PREFIX):
        return
    for _ in range(_TRIES):
        if not (folder / _OWNER).exists():
            _remove(folder)
            return
        _remove_if_abandoned(folder)
        time.sleep(_BETWEEN_TRIES_S)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder made here whose owner is dead; leave any other as it is."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        with (folder / _OWNER).open() as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
    except OSError:  # another's, none of ours, or in use
        return


def _make() -> Path:
    """Make a folder and lock it before its lock can be found, so that nobody takes it for abandoned."""
    base = _base()
    for other in base.glob(f"{PREFIX}*"):
        _remove_if_abandoned(other)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    owner = (folder / f"{_OWNER}.new").open("w")
    fcntl.flock(owner, fcntl.LOCK_EX)
    (folder / f"{_OWNER}.new").rename(folder / _OWNER)
    _owned[folder] = owner
    Finalize(None, remove_own, exitpriority=_AFTER_MULTIPROCESSING)
    return folder


def _base() -> Path:
    """Return the temporary folder; `/tmp` where its path is too long for the sockets that will lie below it."""
    usual = Path(tempfile.gettempdir())
    some_name = f"/{PREFIX}{'x' * 8}"
    too_long = len(os.fsencode(usual)) + len(some_name) > _LONGEST
    return Path("/tmp") if too_long and os.access("/tmp", os.W_OK) else usual


def _remove(folder: Path) -> None:
    """Remove a folder into which processes that are about to end may still write."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
