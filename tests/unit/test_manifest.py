"""onnxlm.json: what is written is read back, and every fault names its field."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packages import sample_manifest

from onnxlm.errors import PackageError
from onnxlm.io_spec import StateSpec, TensorSpec
from onnxlm.manifest import (
    LOWERINGS,
    MANIFEST_NAME,
    PRECISIONS,
    FileSpec,
    GraphSpec,
    Manifest,
    ParameterSpec,
    Producer,
    QuantizationSpec,
    WeightsSpec,
    check_file_name,
    read_manifest,
)

HASH = "0123456789abcdef" * 4

words = st.text(max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=12)
counts = st.integers(0, 2**53)
finite = st.floats(allow_nan=False, allow_infinity=False)
free_values = st.recursive(
    st.none() | st.booleans() | counts | finite | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
free = st.dictionaries(words, free_values, max_size=4)
shapes = st.lists(st.integers(0, 2**31) | words, max_size=4).map(tuple)
tensors = st.builds(TensorSpec, words, words, shapes)
parameters = st.builds(
    ParameterSpec,
    words,
    st.none() | st.tuples(counts, st.integers(1, 99)).map(lambda r: (r[0], r[0] + r[1])),
    st.booleans(),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    states = draw(
        st.lists(
            st.builds(
                StateSpec, names, names, words, shapes, st.sampled_from(["in_place", "append"])
            ),
            max_size=3,
        )
    )
    graphs: dict[str, GraphSpec] = {}
    for name in draw(st.lists(names, min_size=1, max_size=2, unique=True)):
        inputs = [
            *draw(st.lists(tensors, max_size=2)),
            *(TensorSpec(s.past, "f", ()) for s in states),
        ]
        outputs = [
            *draw(st.lists(tensors, max_size=2)),
            *(TensorSpec(s.present, "f", ()) for s in states),
        ]
        numbers = st.dictionaries(words, counts, max_size=3)
        graphs[name] = GraphSpec(
            f"{name}.onnx", tuple(inputs), tuple(outputs), draw(numbers), draw(numbers)
        )
    weights = WeightsSpec("weights", draw(counts))
    files = {graph.file: FileSpec(draw(counts), HASH) for graph in graphs.values()}
    return Manifest(
        producer=Producer(
            draw(words), draw(words), draw(st.dictionaries(words, words, max_size=2))
        ),
        task="text-generation",
        architecture=draw(words),
        precision=draw(st.sampled_from(PRECISIONS)),
        lowering=draw(st.sampled_from(LOWERINGS)),
        graphs=graphs,
        states=tuple(states),
        weights=weights,
        vocab_size=draw(st.integers(1, 2**31)),
        context_length=draw(st.integers(1, 2**31)),
        source=draw(free),
        quantization=draw(st.none() | st.builds(QuantizationSpec, words, free)),
        quality=draw(st.dictionaries(words, finite, max_size=3)),
        parity=draw(free),
        parameters=draw(st.dictionaries(words, parameters, max_size=3)),
        files=files | {weights.file: FileSpec(weights.bytes, HASH)},
    )


@given(manifests())
@settings(max_examples=150, deadline=None)
def test_round_trip(manifest: Manifest) -> None:
    text = manifest.to_json()
    text.encode("utf-8")
    assert Manifest.from_object(json.loads(text), "x") == manifest


def complete() -> dict[str, Any]:
    """A valid manifest as parsed JSON."""
    files = {name: FileSpec(5, HASH) for name in ("prefill.onnx", "decode.onnx", "model.onnx_data")}
    manifest = dataclasses.replace(
        sample_manifest(),
        files=files,
        weights=WeightsSpec(bytes=5),
        quantization=QuantizationSpec("int8", {"bits": 8}),
    )
    value = json.loads(manifest.to_json())
    assert Manifest.from_object(value, "x") == manifest
    return dict(value)


def edit(value: dict[str, Any], path: str, new: object) -> None:
    """Set (or, with `...`, remove) the item at a dotted path."""
    *parents, last = [int(p) if p.isdigit() else p for p in path.split("/")]
    for part in parents:
        value = value[part]  # type: ignore[index]
    if new is ...:
        del value[last]  # type: ignore[arg-type]
    else:
        value[last] = new  # type: ignore[index]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Manifest)])
def test_every_field_is_required_and_typed(name: str) -> None:
    value = complete()
    del value[name]
    with pytest.raises(PackageError, match=f"^x: field '{name}' is missing"):
        Manifest.from_object(value, "x")
    value = complete() | {name: object()}
    with pytest.raises(
        PackageError, match=f"^x: field '{name}' has a wrong type; found .*; allowed: "
    ):
        Manifest.from_object(value, "x")


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("surprise", 1, "field 'surprise' is unknown; allowed: producer"),
        ("format_version", 2, "format_version; found 2; allowed: 1"),
        ("format_version", True, "field 'format_version' has a wrong type; found True"),
        ("format_version", ..., "field 'format_version' is missing"),
        (
            "producer/version",
            1,
            "field 'producer.version' has a wrong type; found 1; allowed: a string",
        ),
        ("graphs/prefill/inputs/1/dtype", ..., "field 'graphs.prefill.inputs[1].dtype' is missing"),
        ("graphs/prefill/inputs/0/shape/1", 1.5, "field 'graphs.prefill.inputs[0].shape[1]' has a"),
        ("graphs/prefill/colour", "red", "field 'graphs.prefill.colour' is unknown"),
        (
            "graphs/decode/opset_imports/com.microsoft",
            "1",
            "field 'graphs.decode.opset_imports.com.micr",
        ),
        ("graphs/decode/file", "../decode.onnx", "field 'graphs.decode.file' holds a file name"),
        ("graphs/decode/file", "other.onnx", "field 'graphs.decode.file' is not in 'files'"),
        ("graphs", {}, "field 'graphs' is empty"),
        ("states/0/past", "nobody", "field 'states[0].past' is not among the inputs of graph"),
        (
            "states/0/present",
            "nobody",
            "field 'states[0].present' is not among the outputs of graph",
        ),
        (
            "states/0/update",
            "magic",
            "field 'states[0].update'; found 'magic'; allowed: in_place, append",
        ),
        (
            "vocab_size",
            True,
            "field 'vocab_size' has a wrong type; found True; allowed: a whole number",
        ),
        ("vocab_size", 0, "field 'vocab_size'; found 0; allowed: above 0"),
        ("context_length", -1, "field 'context_length'; found -1"),
        ("precision", "int3", "field 'precision'; found 'int3'; allowed: fp32, fp16, int8, int4"),
        ("lowering", "soup", "field 'lowering'; found 'soup'"),
        ("task", "dance", "field 'task'; found 'dance'"),
        ("quality", {"kl": "low"}, "field 'quality.kl' has a wrong type"),
        (
            "parameters/q.weight/rows",
            [3],
            "field 'parameters.q.weight.rows' has a wrong type; found [3]",
        ),
        ("parameters/q.weight/rows", [3, 3], "field 'parameters.q.weight.rows' is no range"),
        ("weights/bytes", 6, "field 'weights.bytes' disagrees with 'files'; found 6; allowed: 5"),
        (
            "files/model.onnx_data/sha256",
            "XY",
            "field 'files.model.onnx_data' holds no size and SHA-256",
        ),
        (
            "files/model.onnx_data/bytes",
            -1,
            "field 'files.model.onnx_data' holds no size and SHA-256",
        ),
        ("files/..\\x", {"bytes": 1, "sha256": HASH}, "field 'files' holds a file name"),
        ("quantization/scheme", None, "field 'quantization.scheme' has a wrong type; found None"),
    ],
)
def test_faults_name_the_field(path: str, new: object, message: str) -> None:
    value = complete()
    edit(value, path, new)
    with pytest.raises(PackageError) as caught:
        Manifest.from_object(value, "x")
    assert f"x: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/./x",
        "a//x",
        "x/",
        "..",
        "C:/x",
        "C:x",
        "\\\\host\\share",
        "a\\..\\x",
        "x\0y",
        "x\n",
        "x.",
        "x ",
        "a?",
        MANIFEST_NAME,
        "ONNXLM.json",
    ],
)
def test_file_names_that_leave_the_folder(name: str) -> None:
    with pytest.raises(PackageError, match="a file name that is not allowed"):
        check_file_name("x", "files", name)


@pytest.mark.parametrize("name", ["model.onnx_data", "adapters/a.safetensors", "..x", "héé", "a b"])
def test_plain_file_names(name: str) -> None:
    check_file_name("x", "files", name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "holds no JSON object; found []"),
        (b'{"a": 1', "is not valid JSON"),
        (b'{"a": 1, "a": 2}', "found the key 'a' twice in one object"),
        (b'{"a": NaN}', "found the number NaN"),
        (b"\xff\xfe{", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ],
)
def test_damaged_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(PackageError) as caught:
        read_manifest(tmp_path)
    assert message in str(caught.value)
    assert MANIFEST_NAME in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"onnxlm\.json: cannot be read; found No such file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_not_written(number: float) -> None:
    manifest = dataclasses.replace(sample_manifest(), parity={"worst": [1.0, number]})
    with pytest.raises(PackageError, match=r"field 'parity\.worst\[1\]' is not a finite number"):
        manifest.to_json()
