"""Packed graphs of every kind of package give the logits of the package's own graphs, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.hot_packages import new_folder, package

from onnxlm import io_spec
from onnxlm.package import Package
from onnxlm.quantize import QuantizeOptions, quantize
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.prepacked import PreparedGraphs, open_files, open_graphs, own_files
from onnxlm.runtime.session import SessionConfig
from onnxlm.runtime.sessions import Sessions

CONFIG = SessionConfig(threads=1)
# Characters that the letter tokenizer can spell.
TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times; then it rests.\n" * 8


@functools.cache
def quantized(scheme: str, prefill_rows: bool) -> Package:
    options = QuantizeOptions(prefill_rows=prefill_rows, calibration_text=TEXT)
    return quantize(package(), new_folder() / "quantized", scheme=scheme, options=options)


KINDS = {
    "fp32": package,
    "fp16": lambda: package(precision="fp16"),
    "portable": lambda: package(lowering="portable"),
    "int8": lambda: quantized("int8", False),
    "int4": lambda: quantized("int4", False),
    "prefill with its own rows": lambda: quantized("int8", True),
}


def all_logits(package: Package, prepared: PreparedGraphs) -> NDArray[np.float32]:
    """A prompt with logits at every position, a second chunk, a padded batch, and steps."""
    opened = open_files(prepared, CONFIG)
    manifest = package.manifest
    sessions = Sessions(
        opened[io_spec.PREFILL],
        opened[io_spec.DECODE],
        manifest.states,
        manifest.vocab_size,
        manifest.context_length,
    )
    batch = Batch(sessions, 1)
    found = [batch.prefill_all_logits([5, 3, 80, 2, 2, 41]), batch.prefill_logits([[7, 8, 9]])]
    batch = Batch(sessions, 2)
    logits = batch.prefill_logits([[1, 2, 3, 4, 5], [6, 7]])
    for _ in range(6):
        found.append(logits.copy())
        batch.set_tokens(logits.argmax(axis=-1))
        logits = batch.decode_logits()
    return np.concatenate(found)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_graphs_give_the_same_logits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXLM_CACHE", str(tmp_path))
    made = KINDS[kind]()
    _, prepared = open_graphs(made, CONFIG)
    assert (prepared.cached, prepared.reason) == (True, None)
    own = all_logits(made, PreparedGraphs(own_files(made), cached=False))
    assert np.isfinite(own).all()
    assert np.ptp(own) > 1
    np.testing.assert_array_equal(all_logits(made, prepared), own)
