"""What may be named as a model, and what a wrong name is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.gguf_writer import write_gguf
from support.hot import hot_model, save_folder

from onnxlm.errors import CheckpointError, PackageError
from onnxlm.models.checkpoint import hub, read
from onnxlm.models.registry import find_architecture

TINY = dict(find_architecture("llama").tiny)


def test_folder_with_one_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", hot_model(TINY))
    assert read(tmp_path).kind == read(path).kind == "gguf"
    (tmp_path / "config.json").write_text("{}")  # some GGUF repositories carry a stub
    assert read(tmp_path).kind == "gguf"
    shutil.copy(path, tmp_path / "b.gguf")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"several GGUF files; found a\.gguf, b\.gguf"):
        read(tmp_path)


def test_gguf_file_by_content(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", hot_model(TINY))
    path = path.rename(tmp_path / "blob")
    assert read(path).kind == "gguf"


def test_safetensors_win_over_a_gguf_file_beside_them(tmp_path: Path) -> None:
    oracle = hot_model(TINY)
    write_gguf(save_folder(oracle, tmp_path) / "a.gguf", oracle)
    assert read(tmp_path).kind == "huggingface"


def test_single_weight_file_is_answered_with_its_folder(tmp_path: Path) -> None:
    save_folder(hot_model(TINY), tmp_path)
    with pytest.raises(CheckpointError, match=rf"not a model file.*give the folder: {tmp_path}"):
        read(tmp_path / "model.safetensors")


def test_half_a_package_is_no_folder_of_another_kind(tmp_path: Path) -> None:
    save_folder(hot_model(TINY), tmp_path)
    (tmp_path / "onnxlm.json").write_text("{}")
    with pytest.raises(PackageError, match=r"onnxlm\.json: field 'producer' is missing"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["nothing-here", "/no/such/folder", "a b/c", "../x/y"])
def test_missing_path_lists_what_is_accepted(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such file or folder; allowed: .*Hub id"):
        read(name)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model in this folder; allowed"):
        read(tmp_path)


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        read("some-org/some-model")
    message = str(raised.value)
    assert message.startswith("some-org/some-model: there is no such path, and the Hub")
    assert "check the name and the network" in message
    assert "\n" not in message


def test_hub_model_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repository = tmp_path / "models--some-org--some-model"
    save_folder(hot_model(TINY), repository / "snapshots" / ("1" * 40))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("1" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    checkpoint = read("some-org/some-model")
    assert checkpoint.provenance["hub_id"] == "some-org/some-model"
    assert checkpoint.provenance["revision"] == "1" * 40


def test_only_weights_and_texts_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, list[str]] = {}

    def snapshot_download(repo_id: str, **patterns: list[str]) -> str:
        asked.update(patterns)
        return "folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    hub.fetch("some-org/some-model")
    wanted = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    unwanted = ["pytorch_model.bin", "modeling.py", "original/consolidated.safetensors", "x.gguf"]
    assert list(filter_repo_objects(wanted + unwanted, **asked)) == wanted
