"""The command line on SmolLM2-135M."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.commands import run_process
from support.quantized import stored_parameters

from onnxlm.models import load
from onnxlm.package import open_package

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

# The checkpoint's config: 30 layers of 9 query and 3 key-value heads of 64, hidden 576, 1536 in the MLP.
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
PARAMETERS = {
    "embedding": 49152 * 576,
    "attention": 30 * 576 * 64 * (9 + 3 + 3 + 9),
    "mlp": 30 * 3 * 576 * 1536,
    "norms": 61 * 576,
    "head": 0,
}


def export(smollm2: Path, package: Path, precision: str, most: float) -> None:
    """Export, with what has to hold at every precision; `most` bytes of those of the 4-bit file."""
    made = run_process("export", smollm2, package, "--precision", precision)
    assert (made.code, made.err) == (0, "")
    total = sum(path.stat().st_size for path in package.iterdir())
    assert total <= most * smollm2.stat().st_size
    looked = json.loads(run_process("inspect", package, "--kv-lengths", "2048", "--json").out)
    parts = looked["components"]
    assert {name: parts[name]["parameters"] for name in PARAMETERS} == PARAMETERS
    assert looked["kv_cache"]["attention"] == "GQA"
    assert looked["kv_cache"]["bytes_at"] == {"2048": 2048 * KV_BYTES_PER_TOKEN}
    ran = run_process("generate", package, "The capital of France is", "--max-new-tokens", "12")
    assert ran.code == 0
    assert ran.out.startswith(" Paris.")
    assert ran.err.startswith("cpu: TTFT ")
    assert ran.err.count("\n") == 1


def test_int8_is_near_the_file(smollm2: Path, tmp_path: Path) -> None:
    package = tmp_path / "smollm2"
    export(smollm2, package, "int8", 1.7)
    options = ("--against", smollm2, "--tokens", "300", "--window", "200", "--stride", "100")
    ran = run_process("eval", package, *options, "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    quality = found["comparison"]["quality"]
    assert (found["tokens"], quality["tokens"], quality["verdict"]) == (299, 299, "good")
    assert 0 < quality["kl"] < found["comparison"]["kl_p99"] < quality["kl_max"] < 1
    assert quality["kl"] < 0.02
    assert quality["top1"] > 0.93
    assert abs(quality["perplexity_change"]) < 0.03
    assert found["comparison"]["greedy"]["mean"] > 5


def test_int4_holds_the_files_own_weights(smollm2: Path, tmp_path: Path) -> None:
    export(smollm2, tmp_path / "smollm2", "int4", 1.15)
    model = load(smollm2)
    found = stored_parameters(open_package(tmp_path / "smollm2"), model)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.detach()), name
