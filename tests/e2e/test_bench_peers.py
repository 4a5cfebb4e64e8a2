"""`benchmarks/peers.py` with its real workers for packages and the eager model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers.py"


def test_an_fp32_package_is_the_eager_model(
    tiny_source: Path, tiny_package: Path, tmp_path: Path
) -> None:
    file = tmp_path / "peers.json"
    command = [
        *(sys.executable, str(SCRIPT), "--source", str(tiny_source)),
        *("--package", f"ours={tiny_package}", "--eager", "--threads", "1"),
        *("--prompt-tokens", "8", "--new-tokens", "3", "--rounds", "2"),
        *("--quality-tokens", "48", "--decode-quality"),
        *("--against", "ours=eager fp32", "--json", str(file)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "ours / eager fp32 at 8: prefill " in done.stdout
    ours, eager = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert (ours["name"], eager["name"]) == ("ours", "eager fp32")
    assert (ours["failure"], len(ours["rounds"])) == (None, 2)
    for way in ("prefill", "decode"):
        # Full precision, so that only rounding is left.
        assert ours["quality"][way]["tokens"] == 48
        assert ours["quality"][way]["kl"] < 1e-6
        assert ours["quality"][way]["top1"] == 1.0
    # Without its table of embeddings, read by the row, the model is what a step reads.
    assert 0 < ours["bytes_per_step"] < ours["bytes"]


def test_a_worker_that_cannot_load_is_one_line(tiny_source: Path, tmp_path: Path) -> None:
    absent = tmp_path / "nothing"
    command = [
        *(sys.executable, str(SCRIPT), "--source", str(tiny_source)),
        *("--package", f"ours={absent}", "--quality-tokens", "0", "--prompt-tokens", "8"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: ours: PackageError: {absent}: is no package")
