"""Property tests draw the same examples on every run and write nothing into the tree; no tracker leaves the machine."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_table import promise, pytest_addoption, pytest_configure, pytest_runtest_makereport, pytest_terminal_summary
from hypothesis import settings
from tracked import FAKE_SECRET, HOST_NAME

__all__ = ["promise", "pytest_addoption", "pytest_configure", "pytest_runtest_makereport", "pytest_terminal_summary"]

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture
def loopback_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let nothing reach a real server, nor the home folder, and put in place what must not be written."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", FAKE_SECRET)
    monkeypatch.setattr("socket.gethostname", lambda: HOST_NAME)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "20260101-120000-my sweep"  # a space, as a user's path may have
    path.mkdir()
    return path


@pytest.fixture
def warnings_told() -> list[str]:
    return []


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield an empty folder for TMPDIR, with a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def tiny_disk() -> Iterator[Path]:
    """Yield a folder on a disk of 64 KiB, with a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    try:
        if mounted.returncode:
            pytest.skip("needs the right to mount a tmpfs")
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=not mounted.returncode, capture_output=True)
        folder.rmdir()
