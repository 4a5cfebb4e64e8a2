"""Packages that a provider runs, and those that it refuses: manifests alone, nothing is opened."""

from __future__ import annotations

import dataclasses
import re

import onnxruntime as ort
import pytest
from support.runtime_models import counting_package

from onnxlm.errors import ProviderError
from onnxlm.manifest import Manifest, QuantizationSpec
from onnxlm.runtime.providers import find_provider


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        (
            {"lowering": "ort"},
            "this lowering; found ort; allowed: plain; export the model with --lowering plain",
        ),
        (
            {"precision": "int8"},
            "this precision; found int8; allowed: fp32, fp16; export the model with --precision",
        ),
    ],
)
def test_packages_that_openvino_does_not_run(changes: dict[str, str], message: str | None) -> None:
    fields = {"lowering": "plain", "precision": "fp32"} | changes
    manifest = dataclasses.replace(counting_package().manifest, **fields)
    if message is None:
        find_provider("openvino").check_package("openvino", manifest)
        return
    expected = f"^execution provider 'openvino' does not run packages of {message}"
    with pytest.raises(ProviderError, match=expected):
        find_provider("openvino").check_package("openvino", manifest)


def made(lowering: str, dtype: str, precision: str, prefill_weights: str | None = None) -> Manifest:
    """The manifest of such a package."""
    manifest = counting_package().manifest
    spec = None
    if prefill_weights is not None:
        spec = QuantizationSpec(precision, {"prefill_weights": prefill_weights})
    return dataclasses.replace(
        manifest,
        lowering=lowering,
        precision=precision,
        states=tuple(dataclasses.replace(state, dtype=dtype) for state in manifest.states),
        quantization=spec,
    )


OWN = "own, one scale per row"


@pytest.mark.parametrize(
    "package",
    [
        ("ort", "float16", "fp16"),
        ("ort", "float16", "int8", "shared"),
        ("ort", "float16", "int4", "shared"),
        ("portable", "float32", "fp32"),
        ("portable", "float16", "fp16"),
        ("plain", "float32", "fp32"),
    ],
    ids="-".join,
)
def test_packages_that_cuda_runs(package: tuple[str, ...]) -> None:
    find_provider("cuda").check_package("cuda", made(*package))


@pytest.mark.parametrize(
    ("package", "message"),
    [
        (
            ("ort", "float32", "fp32"),
            "execution provider 'cuda' does not run lowering ort in this type; found float32; allowed: "
            "float16; export with --precision fp16, or export with --lowering portable",
        ),
        (
            ("ort", "float32", "int4", "shared"),
            "execution provider 'cuda' does not run lowering ort in this type; found float32; allowed: "
            "float16; export with --precision int4 --activations fp16, or export with "
            "--lowering portable",
        ),
        (
            ("ort", "float16", "int8", OWN),
            "execution provider 'cuda' has no kernels for prefill weights of their own; found own, one "
            "scale per row; allowed: shared; quantize without --prefill-rows",
        ),
    ],
    ids=["fp32", "int4-of-fp32", "prefill-rows"],
)
def test_packages_that_cuda_does_not_run(package: tuple[str, ...], message: str) -> None:
    with pytest.raises(ProviderError, match=f"^{re.escape(message)}$"):
        find_provider("cuda").check_package("cuda", made(*package))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("weights", ["shared", OWN])
def test_the_cpu_runs_them_all(dtype: str, weights: str) -> None:
    find_provider("cpu").check_package("cpu", made("ort", dtype, "int8", weights))


@pytest.mark.parametrize(
    ("version", "lowering", "message"),
    [
        (
            "1.31.1",
            "ort",
            "packages of lowering ort need onnxruntime >= 1.32; found 1.31.1; upgrade it, or export with "
            "--lowering portable",
        ),
        ("1.9.0", "ort", "packages of lowering ort need onnxruntime >= 1.32; found 1.9.0; upgrade"),
        ("1.31.1", "portable", None),
        ("1.32.0", "ort", None),
        ("1.32.0.dev20260901+cu130", "ort", None),
        ("2.0", "ort", None),
    ],
)
def test_versions_that_open_a_package(
    monkeypatch: pytest.MonkeyPatch, version: str, lowering: str, message: str | None
) -> None:
    monkeypatch.setattr(ort, "__version__", version)
    manifest = made(lowering, "float16", "fp16")
    if message is None:
        find_provider("cuda").check_version(manifest)
        return
    with pytest.raises(ProviderError, match=f"^{re.escape(message)}"):
        find_provider("cuda").check_version(manifest)
