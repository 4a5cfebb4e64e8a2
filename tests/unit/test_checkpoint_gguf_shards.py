"""One model in several GGUF files: the model of one file, and the ways in which they may not fit together."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from support import gguf_writer
from support.gguf_writer import write_gguf
from support.hot import hot_model
from support.refusals import refusal

from onnxlm.models.checkpoint import read
from onnxlm.models.registry import find_architecture

TINY = dict(find_architecture("llama").tiny)
COUNT = 3


def shard(folder: Path, number: int, stem: str = "a") -> Path:
    return folder / f"{stem}-{number:05d}-of-{COUNT:05d}.gguf"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in three files."""
    return written(tmp_path / "many", monkeypatch, seed=0)


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Path:
    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patched:
        patched.setattr(gguf_writer, "GGUFWriter", partial(GGUFWriter, split_max_tensors=8))
        write_gguf(folder / "a.gguf", hot_model(TINY, seed))
    assert sorted(folder.iterdir()) == [shard(folder, number) for number in (1, 2, 3)]
    return folder


@pytest.mark.parametrize("named", [1, 3])
def test_any_of_the_files_stands_for_all(tmp_path: Path, folder: Path, named: int) -> None:
    whole = dict(read(write_gguf(tmp_path / "whole.gguf", hot_model(TINY))).state())
    checkpoint = read(shard(folder, named))
    state = dict(checkpoint.state())
    assert list(state) == list(whole)
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    files = checkpoint.provenance["files"]
    assert files == {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def test_a_folder_with_them(folder: Path) -> None:
    assert read(folder).kind == "gguf"
    shutil.copy(shard(folder, 1), folder / "b.gguf")
    assert f"several GGUF files; found {shard(folder, 1).name}, b.gguf" in refusal(folder)


def test_a_fault_names_the_file_that_has_it(folder: Path) -> None:
    tensors = {tensor.name: tensor.file for tensor in read(folder).tensors.values()}
    assert tensors["token_embd.weight"] == shard(folder, 1).name
    assert set(tensors.values()) == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_file(folder: Path, number: int) -> None:
    shard(folder, number).unlink()
    for source in (folder, shard(folder, 3)):
        message = refusal(source)
        assert f"files of this model are missing: {shard(folder, number).name}" in message


def test_a_name_that_says_nothing(folder: Path) -> None:
    shard(folder, 2).rename(folder / "model.gguf")
    assert "one of 3 files of a model, whose name does not say which" in refusal(
        folder / "model.gguf"
    )


def test_a_file_in_the_place_of_another(folder: Path) -> None:
    shutil.copy(shard(folder, 3), shard(folder, 2))
    message = refusal(shard(folder, 1))
    assert (
        f"{shard(folder, 2).name}: not the file that its name says; "
        "found split.no 2, split.count 3; allowed: 1 and 3" in message
    )


def test_a_cut_file(folder: Path) -> None:
    data = shard(folder, 3).read_bytes()
    shard(folder, 3).write_bytes(data[:-40])
    assert f"{shard(folder, 3)}: the GGUF file is damaged or cut short" in refusal(folder)


def test_tensors_that_two_files_hold(folder: Path) -> None:
    """As after a file of another way to part the model was put in."""
    data = shard(folder, 2).read_bytes()
    shard(folder, 3).write_bytes(number_changed(data, 1, 2))
    message = refusal(folder)
    assert f"{shard(folder, 3).name}: tensors that an earlier file holds too" in message


def test_the_number_of_tensors_in_all(folder: Path) -> None:
    total = len(read(folder).tensors)
    data = shard(folder, 1).read_bytes()
    key = b"split.tensors.count" + (5).to_bytes(4, "little")
    where = data.index(key) + len(key)
    shard(folder, 1).write_bytes(data[:where] + (99).to_bytes(4, "little") + data[where + 4 :])
    assert f"tensors in all 3 files; found {total}; allowed: 99" in refusal(folder)


def number_changed(data: bytes, old: int, new: int) -> bytes:
    """The bytes of a file that says it is another one of the three."""
    key = b"split.no" + (2).to_bytes(4, "little")  # a value of 16 bits
    return data.replace(key + old.to_bytes(2, "little"), key + new.to_bytes(2, "little"))
