"""The files of a sweep's folder: read, put in place and locked so that nothing outside the folder is touched.

A folder may come from anyone, and a name in it may be a link, a pipe or a device. Who reads, renames, removes or
writes there asks `own` for the path first; the folder itself may be reached by a link, since the user named it.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import TextIO

from pipebench.errors import ResultError

MOST_BYTES = 2**30
"""No honest file comes near: 1000 steps of 16 stages and 128 micro-batches are a quarter of it."""

_HALF_WRITTEN = ".pipebench-"
"""How the name of a file begins that has not taken its place yet; nobody else's begins so."""


def own(folder: Path, path: Path) -> Path:
    """Return `path`, which is `folder` or below it. Raise ResultError where it is a link, or reached through one."""
    part = folder
    for name in path.relative_to(folder).parts:
        part /= name
        if part.is_symlink():
            raise ResultError(f"{part}: is a link, which may lead out of the folder: expected none there")
    return path


def read_text(path: Path) -> str:
    """Return what is in a regular file of at most MOST_BYTES.

    Raise ResultError for whatever is none, without waiting for it; OSError or ValueError where it cannot be read.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ResultError(f"{path}: is a pipe or a device: expected a regular file")
        if status.st_size > MOST_BYTES:
            raise ResultError(f"{path}: has {status.st_size} bytes: expected at most {MOST_BYTES}")
        return file.read(status.st_size).decode()


def put(path: Path, content: bytes) -> None:
    """Write atomically: a reader sees the old file or the new one, never half of one; a link there is replaced.

    Raise OSError where the disk is full or the folder cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{_HALF_WRITTEN}{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # interrupted right after it took its place
            os.unlink(temporary)
        raise


def remove_half_written(folder: Path) -> None:
    """Remove what a killed process was about to put in place in this very folder."""
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.glob(f"{_HALF_WRITTEN}*"):
            if path.is_file():
                path.unlink()


def set_aside(path: Path, what: str) -> str:
    """Rename a file, a folder or a link itself to the first free `NAME.<what>-N`; return the new name."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{what}-{number}")):
        number += 1
    path.rename(aside)
    return aside.name


def open_lock(path: Path) -> TextIO:
    """Open a regular file to lock, made where there is none. Raise OSError for whatever else stands there."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path}: expected a regular file")
    return os.fdopen(handle, "a")


def _open_at_once(path: str, flags: int) -> int:
    """A pipe makes its reader wait for a writer, unless told not to."""
    return os.open(path, flags | os.O_NONBLOCK)
