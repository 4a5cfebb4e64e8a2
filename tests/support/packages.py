"""A small package of arbitrary bytes behind real ONNX files: enough for everything but running it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from onnxlm.integrity import hash_file
from onnxlm.io_spec import StateSpec, TensorSpec
from onnxlm.manifest import (
    MANIFEST_NAME,
    GraphSpec,
    Manifest,
    ParameterSpec,
    Producer,
    WeightsSpec,
    read_manifest,
)
from onnxlm.package import Package, PackageWriter

# An empty ModelProto with ir_version 10: real ONNX without the onnx package.
EMPTY_MODEL = b"\x08\x0a"


def sample_manifest(source: dict[str, object] | None = None) -> Manifest:
    past, present = "past_key_values.0.key", "present.0.key"
    shape = ("batch_size", 1, "past_sequence_length", 8)
    inputs = (
        TensorSpec("input_ids", "int64", ("batch_size", "sequence_length")),
        TensorSpec(past, "float32", shape),
    )
    outputs = (
        TensorSpec("logits", "float32", ("batch_size", "sequence_length", 32)),
        TensorSpec(present, "float32", shape),
    )
    graphs = {
        name: GraphSpec(
            f"{name}.onnx", inputs, outputs, {"": 23, "com.microsoft": 1}, {"packed_qkv": 2}
        )
        for name in ("prefill", "decode")
    }
    return Manifest(
        producer=Producer("onnxlm", "0.1.0", {"torch": "2.13.0"}),
        task="text-generation",
        architecture="llama",
        precision="fp32",
        lowering="ort",
        graphs=graphs,
        states=(StateSpec(past, present, "float32", shape, "in_place"),),
        weights=WeightsSpec(),
        vocab_size=32,
        context_length=64,
        source=source or {"format": "gguf"},
        parameters={"q.weight": ParameterSpec("qkv.weight", (0, 8), True)},
    )


def write_package(path: Path, weights: bytes = b"w" * 1000, mark: str = "") -> Package:
    """Write a package whose weights are `weights`, and `mark` in a config.json."""
    with PackageWriter(path) as writer:
        for name in ("prefill.onnx", "decode.onnx"):
            (writer.path / name).write_bytes(EMPTY_MODEL)
        (writer.path / "model.onnx_data").write_bytes(weights)
        (writer.path / "config.json").write_text(f'{{"mark": "{mark}"}}', encoding="utf-8")
        return writer.finish(sample_manifest({"mark": mark}))


def replace_file(path: Path, name: str, content: bytes) -> None:
    """Change a file of a package together with its hash, as a package written so would have it."""
    (path / name).write_bytes(content)
    manifest = read_manifest(path)
    files = {**manifest.files, name: hash_file(path / name)}
    text = dataclasses.replace(manifest, files=files).to_json()
    (path / MANIFEST_NAME).write_text(text, encoding="utf-8")
