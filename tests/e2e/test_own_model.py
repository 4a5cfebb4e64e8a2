"""A user's own combination of blocks: `examples/own_model.py` from its weights to text."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.commands import run_process
from support.tiny import train_tokenizer

from onnxlm.errors import CheckpointError, ConfigError
from onnxlm.export import export
from onnxlm.models.checkpoint import from_module, read
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.runtime import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
SOURCE = f"{EXAMPLE}:build"
IDS = [(37 * position + 11) % 509 for position in range(48)]


def hot() -> DecoderLM:
    """The example's model with weights that show faults."""
    torch.manual_seed(0)
    model: DecoderLM = runpy.run_path(str(EXAMPLE))["build"]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.4 * torch.randn(parameter.shape))
            else:
                parameter.mul_(4)
    return model.eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    train_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(dict(hot().named_parameters()), folder / "own.safetensors")
    return folder / "own.safetensors"


def test_export_verify_quantize_generate(tmp_path: Path, weights: Path) -> None:
    made = run_process("export", SOURCE, tmp_path / "fp32", "--weights", weights)
    assert made.code == 0, made.err
    verified = run_process("verify", tmp_path / "fp32", "--json")
    assert verified.code == 0, verified.out
    quantized = run_process(
        "export", SOURCE, tmp_path / "int8", "--weights", weights, "--precision", "int8"
    )
    assert quantized.code == 0, quantized.err
    said = run_process(
        "generate", tmp_path / "int8", "The capital", "--max-new-tokens", "5", "--json"
    )
    assert len(json.loads(said.out)["token_ids"]) == 5
    seen = run_process("inspect", tmp_path / "int8", "--json")
    assert json.loads(seen.out)["model_type"] == "custom"


@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_a_module_in_memory(tmp_path: Path, lowering: str) -> None:
    """Graphs against the module itself, run at once; exporting leaves the caller's module alone."""
    model = hot()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    checkpoint = from_module(model, tokenizer_files=tokenizer)
    export(checkpoint, tmp_path / "p", lowering=lowering)
    ours, theirs = load(tmp_path / "p").logits(IDS), model.logits(IDS).numpy()
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1, np.abs(theirs).max())
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def refused(source: str, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as raised:
        read(source)
    return str(raised.value)


def test_what_does_not_fit_is_named(tmp_path: Path, weights: Path) -> None:
    assert "no such file" in refused(f"{tmp_path / 'none.py'}:build")
    assert "has no function 'other'" in refused(f"{EXAMPLE}:other")
    module = tmp_path / "m.py"
    module.write_text("def build():\n    return 3\ndef fails():\n    raise ValueError('mine')\n")
    assert "returns no model; found int" in refused(f"{module}:build")
    assert "ValueError('mine')" in refused(f"{module}:fails")
    module.write_text("1 / 0\n")
    assert "cannot be run; found ZeroDivisionError" in refused(f"{module}:build")
    short: dict[str, Any] = dict(hot().named_parameters())
    del short["norm.weight"]
    save_file(short, tmp_path / "short.safetensors")
    assert "tensors are missing: norm.weight" in refused(
        f"{SOURCE}@{tmp_path / 'short.safetensors'}"
    )


def test_a_context_without_limit_is_asked_for() -> None:
    model = hot()
    model.layers = torch.nn.ModuleList(model.layers[:1])
    unlimited = DecoderLM(model.embed_tokens, list(model.layers), model.norm, model.lm_head)
    with pytest.raises(ConfigError, match=r"give DecoderLM Positions\(limit"):
        from_module(unlimited)
