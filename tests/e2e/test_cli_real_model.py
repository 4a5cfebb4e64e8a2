"""The command line on SmolLM2-135M."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ran, run_process

Cli = Callable[..., Ran]
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


@pytest.mark.parametrize(
    ("precision", "most_bytes"),
    [("int4", 1.15), ("int8", 1.7)],  # of the 4-bit file; its own codes are kept at 4 bits
)
def test_export_inspect_generate(
    smollm2: Path, tmp_path: Path, precision: str, most_bytes: float
) -> None:
    package = tmp_path / "smollm2"
    made = run_process("export", smollm2, package, "--precision", precision)
    assert (made.code, made.err) == (0, "")
    total = sum(path.stat().st_size for path in package.iterdir())
    assert total <= most_bytes * smollm2.stat().st_size
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
