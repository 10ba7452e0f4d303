"""Temporary files of a process lie in one folder of its own, and the environment is as it was afterwards."""

import fcntl
import os
import tempfile
import threading
from pathlib import Path

import pytest

from pipebench import temporary as temporary_folders
from pipebench.errors import ResultError
from pipebench.temporary import private_temporary_folder, remove_behind_owner, remove_own


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> Path:
    """The temporary folder of a process that has made no folder of its own yet."""
    monkeypatch.setattr("pipebench.temporary._owned", {})
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return temporary


def test_the_folder_is_the_same_each_time_and_all_variables_are_put_back(base: Path) -> None:
    before = dict(os.environ)
    seen = []
    for _ in range(2):
        with private_temporary_folder():
            seen.append(tempfile.gettempdir())
            assert os.environ["TMPDIR"] == seen[-1]
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(seen[-1])
        assert tempfile.gettempdir() == str(base)
        assert dict(os.environ) == before
    assert seen[0] == seen[1]
    assert Path(seen[0]).parent == base
    remove_own()
    assert list(base.iterdir()) == []


def test_a_living_owner_s_folder_is_left_alone_and_a_dead_one_s_removed(base: Path) -> None:
    for name in ("pipebench-dead", "pipebench-alive"):
        (base / name).mkdir()
        (base / name / "owner").touch()
    with (base / "pipebench-alive" / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with private_temporary_folder():
            own = Path(tempfile.gettempdir())
        assert {path.name for path in base.iterdir()} == {"pipebench-alive", own.name}
    remove_own()


def test_a_link_to_somebody_s_folder_is_not_followed(base: Path, tmp_path: Path) -> None:
    (tmp_path / "owner").touch()
    (base / "pipebench-link").symlink_to(tmp_path)
    with private_temporary_folder():
        pass
    assert (tmp_path / "owner").exists()
    remove_own()


def test_a_path_too_long_for_sockets_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = base / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with private_temporary_folder():
        assert Path(tempfile.gettempdir()).parent == Path("/tmp")
        assert len(f"{tempfile.gettempdir()}/pymp-xxxxxxxx/listener-xxxxxxxx") <= 107
    remove_own()


def test_a_folder_that_cannot_be_made_is_one_line(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(base / "missing"))
    with (
        pytest.raises(ResultError, match=r"^temporary folder \(TMPDIR\): cannot be written: "),
        private_temporary_folder(),
    ):
        pass


def test_nothing_of_a_plain_temporary_folder_is_removed_behind_an_owner(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server of a process that made no folder of its own; nor is anything of where it happens to work."""
    (base / "owner").touch()
    monkeypatch.chdir(base)
    monkeypatch.delenv("PIPEBENCH_TEMPORARY", raising=False)
    remove_behind_owner()
    assert [path.name for path in base.iterdir()] == ["owner"]


def test_an_owner_that_takes_a_moment_to_die_is_waited_for(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_temporary_folder():
        own = Path(tempfile.gettempdir())
    monkeypatch.setenv("PIPEBENCH_TEMPORARY", str(own))
    [owner] = temporary_folders._owned.values()
    threading.Timer(0.2, owner.close).start()
    remove_behind_owner()
    assert not own.exists()


def test_a_living_owner_keeps_its_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_temporary_folder():
        own = Path(tempfile.gettempdir())
    monkeypatch.setenv("PIPEBENCH_TEMPORARY", str(own))
    remove_behind_owner()
    assert own.exists()
    remove_own()
