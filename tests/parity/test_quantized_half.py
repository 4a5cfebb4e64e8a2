"""Packages of small weights and activations of 16 bits, as GPUs want them: made from fp16 packages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from parity.tolerances import tolerance
from support.gguf_writer import write_gguf
from support.matrix import REPRESENTATIVES, cases
from support.quantized import (
    TEXT,
    checkpoint,
    codes_of,
    eager,
    half_source,
    initializers,
    oracle,
    stored_parameters,
    with_parameters,
)
from support.quantized_runs import ROUNDED, assert_computes, assert_follows

from onnxlm.errors import QuantizationError
from onnxlm.models import load
from onnxlm.models.registry import architecture_names
from onnxlm.package import Package
from onnxlm.quantize import QuantizeOptions, quantize
from onnxlm.quantize.rewrite import LOWERINGS
from onnxlm.quantize.schemes import scheme_names
from onnxlm.workflow import make_package

OPTIONS = QuantizeOptions(calibration_text=TEXT)
HALF = tolerance("graph", "float16")
PACKAGES = cases(
    [(family, lowering) for family in architecture_names() for lowering in LOWERINGS],
    lambda family, lowering: family == "llama" or (lowering == "ort" and family in REPRESENTATIVES),
)


def assert_half(package: Package) -> None:
    """No state and no stored number is of 32 bits."""
    assert {state.dtype for state in package.manifest.states} == {"float16"}
    floats = {a.dtype for a in initializers(package).values() if a.dtype.kind == "f" and a.size > 1}
    assert floats == {np.dtype(np.float16)}


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("key", PACKAGES)
def test_graphs_compute_with_the_stored_codes(
    key: tuple[str, str], scheme: str, tmp_path: Path
) -> None:
    package = quantize(half_source(*key), tmp_path / "q", scheme=scheme, options=OPTIONS)
    assert package.manifest.precision == scheme
    assert_half(package)
    model = eager(key[0], "tiny")
    assert_computes(package, with_parameters(model, stored_parameters(package, model)), HALF)
    if scheme == "int8":  # what is stored, smoothing in norms included, is the model itself
        assert_follows(package.path, model, ROUNDED)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("bits", [4, 8])
def test_given_blocks_with_offsets(bits: int, lowering: str, tmp_path: Path) -> None:
    model = eager("llama", "tiny")
    given = codes_of(model, lambda _: (bits, 32, False))
    package = quantize(half_source("llama", lowering), tmp_path / "q", given=given)
    assert_half(package)
    assert_computes(package, with_parameters(model, stored_parameters(package, model)), HALF)
    stored = stored_parameters(package, model)
    for name, codes in given.items():
        # Scale and offset are rounded to 11 bits each.
        least = np.abs(codes.codes.astype(np.float32) - 2 ** (bits - 1)).max() * codes.scale.max()
        assert codes.offset is not None
        bound = 2**-11 * (least + np.abs(codes.offset).max()) * 1.01
        np.testing.assert_allclose(stored[name].numpy(), codes.dequantize(), rtol=0, atol=bound)


def test_what_16_bits_do_not_reach_is_refused(tmp_path: Path) -> None:
    model = eager("llama", "tiny")
    given = codes_of(model, lambda _: (4, 32, True))
    name = next(name for name in given if name.endswith("down_proj.weight"))
    given[name].scale[0, 0] = 1e5
    with pytest.raises(QuantizationError, match=r"down_proj.*16 bits cannot hold it; found 100000"):
        quantize(half_source("llama"), tmp_path / "q", given=given)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_their_own_for_prefill_are_refused(tmp_path: Path) -> None:
    options = QuantizeOptions(calibration_text=TEXT, prefill_rows=True)
    with pytest.raises(QuantizationError, match="found activations in fp16; allowed: fp32"):
        quantize(half_source("llama"), tmp_path / "q", options=options)
    options = QuantizeOptions(prefill_rows=True, activations="fp16")
    with pytest.raises(QuantizationError, match="found activations in fp16; allowed: fp32"):
        make_package(checkpoint("llama", "tiny"), tmp_path / "q", precision="int8", options=options)


def test_activations_are_those_of_the_package(tmp_path: Path) -> None:
    options = QuantizeOptions(calibration_text=TEXT, activations="fp32")
    with pytest.raises(
        QuantizationError, match="activations; found 'fp32'; allowed: fp16, as the package has them"
    ):
        quantize(half_source("llama"), tmp_path / "q", options=options)


def test_a_files_own_blocks_are_taken_over(tmp_path: Path) -> None:
    """Q4_0 has scales of 16 bits: nothing is rounded."""
    kind = GGMLQuantizationType.Q4_0
    file = write_gguf(tmp_path / "model.gguf", oracle("llama", "tiny"), lambda name: kind)
    options = QuantizeOptions(activations="fp16")
    package = make_package(file, tmp_path / "q", precision="int4", options=options)
    assert_half(package)
    model = load(file)
    found = stored_parameters(package, model)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            assert torch.equal(found[name], parameter.detach()), name
    assert_computes(package, with_parameters(model, found), HALF)
