"""What `onnxlm export` says beside its summary: no tokenizer, a package that is no use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.commands import Ran

Cli = Callable[..., Ran]
FINAL_NORM, MATRIX = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_source, tmp_path / "source"))


def put(source: Path, name: str, value: float) -> None:
    """One value of a tensor."""
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("others", [[], ["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_a_source_without_tokenizer_json(cli: Cli, source: Path, others: list[str]) -> None:
    (source / "tokenizer.json").unlink()
    for name in others:
        (source / name).write_text("{}", encoding="utf-8")
    ran = cli("export", source, source.parent / "out", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["precision"] == "fp32"
    found = f", found {' and '.join(others)};" if others else ";"
    assert ran.err.startswith(f"note: {source} has no tokenizer.json{found} the package takes and")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_matrix_with_nan_is_refused(cli: Cli, source: Path, precision: str) -> None:
    put(source, MATRIX, float("nan"))
    ran = cli("export", source, source.parent / "out", "--precision", precision)
    assert ran.code == 2
    assert "weight holds NaN or infinity" in ran.err
    assert not (source.parent / "out").exists()


def test_a_package_whose_logits_are_nan_is_no_good_one(cli: Cli, source: Path) -> None:
    """Norms are not quantized: NaN in one shows in the figures, which a manifest cannot hold."""
    put(source, FINAL_NORM, float("nan"))
    ran = cli("export", source, source.parent / "out", "--precision", "int8")
    assert ran.code == 0
    assert "warning: this package says something else than the model" in ran.err
