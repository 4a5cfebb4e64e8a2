"""Quantized graphs compute the same however much of them ONNX Runtime optimizes.

What a session folds at one level it computes at another. MatMulNBits packs codes with constant scales when a
session is opened, so scales that are not constant yet are lost, and nothing says so.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from support.quantized import (
    TEXT,
    codes_of,
    eager,
    initializers,
    source,
    stored_parameters,
    with_parameters,
)
from support.quantized_runs import ROUNDED, assert_follows

from onnxlm.quantize import QuantizeOptions, quantize
from onnxlm.quantize.rewrite import LOWERINGS
from onnxlm.quantized_tensor import QuantizedTensor

LEVELS = (
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
)
OPTIONS = QuantizeOptions(calibration_text=TEXT)
# A table that is the head too, and one that is not, with widths that no block divides; experts.
MODELS = [
    ("llama", "tiny", "ort", "int8"),
    ("llama", "tiny", "ort", "int4"),
    ("llama", "tiny", "portable", "int8"),
    ("llama", "odd widths, untied, biases", "ort", "int8"),
    ("mixtral", "tiny", "ort", "int8"),
    ("mixtral", "tiny", "ort", "int4"),
]


@pytest.mark.parametrize("key", MODELS, ids=", ".join)
def test_schemes(key: tuple[str, str, str, str], tmp_path: Path) -> None:
    package = quantize(source(*key[:3]), tmp_path / "q", scheme=key[3], options=OPTIONS)
    model = eager(*key[:2])
    stored = with_parameters(model, stored_parameters(package, model))
    for level in LEVELS:
        assert_follows(package.path, stored, ROUNDED, level)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_with_offsets(bits: int, lowering: str, tmp_path: Path) -> None:
    """Scales and least values of 16 bits, as GGUF files have them."""
    model = eager("llama", "tiny")
    given = {
        name: short(codes) for name, codes in codes_of(model, lambda _: (bits, 32, False)).items()
    }
    package = quantize(source("llama", "tiny", lowering), tmp_path / "q", given=given)
    assert any(name.endswith(".minimum") for name in initializers(package))
    for level in LEVELS:
        assert_follows(package.path, with_parameters(model, given), ROUNDED, level)


def short(codes: QuantizedTensor) -> QuantizedTensor:
    """The same codes, with a scale and a least value that 16 bits hold."""
    assert codes.offset is not None
    centre = np.float32(2 ** (codes.bits - 1))
    scale = codes.scale.astype(np.float16).astype(np.float32)
    minimum = (codes.offset - centre * scale).astype(np.float16).astype(np.float32)
    return dataclasses.replace(codes, scale=scale, offset=minimum + centre * scale)
