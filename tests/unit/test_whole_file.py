"""Files that are whole or not there, and what is refused before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onnxlm import whole_file
from onnxlm.cli.output_files import write_files
from onnxlm.errors import InputError
from onnxlm.whole_file import check_target, write_whole


def test_a_text_takes_the_place_of_another(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    check_target(file)
    assert list(tmp_path.iterdir()) == []  # asking leaves nothing
    write_whole(file, "old\n")
    file.chmod(0o640)
    check_target(file)
    write_whole(file, "nöw\n")
    assert file.read_bytes() == "nöw\n".encode()
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [file]


def test_what_was_there_stays_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    file.write_text("old", encoding="utf-8")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new"


@pytest.mark.skipif(os.name == "nt", reason="no /dev")
def test_a_device_is_written_to() -> None:
    check_target(Path(os.devnull))
    write_whole(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", ": is a folder; name a file"),
        ("nowhere/out.json", "nowhere/out.json: there is no such folder; make it first"),
        ("file/out.json", "file/out.json: there is no such folder; make it first"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as raised:
        check_target(tmp_path / name)
    assert str(raised.value).endswith(message)


def test_a_folder_that_takes_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(self: Path, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", read_only)
    with pytest.raises(InputError) as raised:
        check_target(tmp_path / "out.json")
    assert str(raised.value) == (
        f"{tmp_path / 'out.json'}: cannot be written; found Permission denied; "
        f"choose another folder, or make {tmp_path} writable"
    )


def test_one_file_that_fails_costs_none_of_the_others(tmp_path: Path) -> None:
    folder, good = tmp_path / "folder", tmp_path / "good"
    folder.mkdir()
    with pytest.raises(InputError) as raised:
        write_files([(folder, lambda: "lost"), (good, lambda: "kept")])
    assert str(raised.value) == f"{folder}: cannot be written; found Is a directory"
    assert good.read_text(encoding="utf-8") == "kept"
