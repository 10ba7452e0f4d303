"""What is read and written in a folder that may come from anyone."""

import os
import socket
from pathlib import Path

import pytest

from pipebench import files
from pipebench.errors import ResultError
from pipebench.record import read_json, write_json


def test_a_path_below_a_folder_is_its_own_unless_it_or_a_folder_on_the_way_is_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "link").symlink_to("inner")
    assert files.own(folder, folder / "inner" / "new") == folder / "inner" / "new"
    for name in ("link", "link/new"):
        with pytest.raises(ResultError, match="folder/link: is a link"):
            files.own(folder, folder / name)


def test_the_folder_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert files.own(tmp_path / "link", tmp_path / "link" / "file") == tmp_path / "link" / "file"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pipe", "expected a regular file"), ("device", "expected a regular file"), ("folder", "Is a directory"),
        ("socket", "No such device"), ("nothing", "No such file"),
    ],
)  # fmt: skip
def test_what_is_no_regular_file_is_refused_in_one_line_and_at_once(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = Path("result.json")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
    with pytest.raises(ResultError, match=rf"^result.json: .*{said}") as refused:
        read_json(path)
    assert "\n" not in str(refused.value)


def test_a_file_larger_than_any_honest_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with path.open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)
    with pytest.raises(ResultError, match=f"has {files.MOST_BYTES + 1} bytes: expected at most {files.MOST_BYTES}"):
        read_json(path)


def test_writing_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "file").symlink_to("target")
    write_json(tmp_path / "file", {"format": 2})
    assert (tmp_path / "target").read_text() == "old"
    assert read_json(tmp_path / "file") == {"format": 2}


def test_setting_aside_renames_a_link_itself_and_takes_no_name_that_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("nowhere")
    (tmp_path / "file.old-1").symlink_to("nowhere either")
    assert files.set_aside(tmp_path / "file", "old") == "file.old-2"
    assert (tmp_path / "file.old-2").readlink() == Path("nowhere")
    assert (tmp_path / "file.old-1").readlink() == Path("nowhere either")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_only_a_regular_file_is_locked(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"\.lock"):
        files.open_lock(path)
    assert not (tmp_path / "target").exists()
