"""Property tests draw the same examples on every run and write nothing into the tree; no tracker leaves the machine."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from tracked import FAKE_SECRET, HOST_NAME

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
