"""A checkpoint from a stranger: it names no file outside its folder and runs no code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hot import hot_model, save_folder
from support.refusals import refusal

from onnxlm.models import load
from onnxlm.models.checkpoint import read
from onnxlm.models.registry import find_architecture

TINY = dict(find_architecture("llama").tiny)
LAST_SHARD = "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save_folder(hot_model(TINY), tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_folder(hot_model(TINY), tmp_path / "sharded", shards=3)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("place", ["../{}", "a/../../{}", "{root}/{}"])
def test_shard_path_that_leaves_the_folder(sharded: Path, place: str) -> None:
    outside = sharded.parent / LAST_SHARD
    (sharded / LAST_SHARD).rename(outside)
    name = place.format(LAST_SHARD, root=sharded.parent)

    def redirect(raw: dict[str, Any]) -> None:
        table = raw["weight_map"]
        raw["weight_map"] = {k: name if v == LAST_SHARD else v for k, v in table.items()}

    edit_json(sharded / INDEX, redirect)
    message = refusal(sharded)
    assert "leaves its folder" in message
    assert repr(name) in message


@pytest.mark.parametrize("name", [LAST_SHARD, "config.json", INDEX])
def test_link_out_of_the_folder(sharded: Path, name: str) -> None:
    outside = sharded.parent / name
    (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    message = refusal(sharded)
    assert "leaves its folder" in message
    assert f"'{name}' linked to {outside}" in message


def test_links_of_the_hub_cache_are_read(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots/0123"
    blobs = tmp_path / "models--org--name/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(dict(read(snapshot).state())) == 20


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickled_weights_are_refused_unopened(single: Path, tmp_path: Path) -> None:
    (single / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    (single / "pytorch_model.bin").write_bytes(pickle.dumps(_Marker(marker)))
    message = refusal(single)
    assert "pytorch_model.bin" in message
    assert "convert" in message
    assert not marker.exists()


def test_code_of_a_checkpoint_is_never_run(single: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (single / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Model: pass\n")
    edit_json(
        single / "config.json",
        lambda raw: raw.update(auto_map={"AutoModelForCausalLM": "modeling_evil.Model"}),
    )
    load(single)
    assert not marker.exists()
