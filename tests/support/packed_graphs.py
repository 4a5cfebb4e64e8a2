"""Small graphs over every kind of weight that kernels pack, in a package that runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxlm.package import Package, PackageWriter
from onnxlm.runtime.prepacked import PreparedGraphs, open_files, own_files
from onnxlm.runtime.session import SessionConfig
from support.packages import sample_manifest

MICROSOFT = "com.microsoft"
DATA = "model.onnx_data"
BLOCK = 32
CONFIG = SessionConfig(threads=1)
IDS = [3, 1, 4, 1, 5, 9]
Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """V rows of the table, K columns of it and inputs of every product, N outputs."""

    vocabulary: int = 64
    inputs: int = 128
    outputs: int = 96


def weights(sizes: Sizes, seed: int = 0) -> dict[str, Array]:
    """Every weight by name; those of prefill alone are named so."""
    rng = np.random.default_rng(seed)
    v, k, n = sizes.vocabulary, sizes.inputs, sizes.outputs

    def codes(rows: int) -> Array:
        return rng.integers(0, 256, (rows, k // BLOCK, BLOCK), dtype=np.uint8)

    def scales(rows: int) -> Array:
        return rng.uniform(0.001, 0.01, (rows, k // BLOCK)).astype(np.float32)

    return {
        "norm": rng.normal(size=k).astype(np.float32),
        "table": codes(v).reshape(v, k),
        "table_scales": scales(v),
        "blocks": codes(n),
        "blocks_scales": scales(n),
        "matrix": rng.normal(size=(k, n)).astype(np.float32),
        "prefill_rows": rng.integers(0, 256, (k, n), dtype=np.uint8),
    }


def write_package(
    path: Path, sizes: Sizes | None = None, *, seed: int = 0, names: Mapping[str, str] | None = None
) -> Package:
    """Write a package whose prefill graph has one matrix more than its decode graph.

    Args:
        path: The new package.
        sizes: Of its weights.
        seed: Of its weights.
        names: What the manifest calls "prefill" and "decode", where it is something else.
    """
    sizes = sizes or Sizes()
    held = weights(sizes, seed)
    manifest = sample_manifest()
    graphs = {(names or {}).get(name, name): graph for name, graph in manifest.graphs.items()}
    with PackageWriter(path) as writer:
        places = _write_data(writer.path / DATA, held)
        for name in ("prefill", "decode"):
            model = _model(name, sizes, held, places)
            (writer.path / f"{name}.onnx").write_bytes(model.SerializeToString())
        return writer.finish(dataclasses.replace(manifest, graphs=graphs))


def outputs(sessions: Mapping[str, ort.InferenceSession]) -> dict[str, list[Array]]:
    """All outputs of every graph."""
    feeds = {"ids": np.array(IDS, dtype=np.int64)}
    return {name: list(session.run(None, feeds)) for name, session in sessions.items()}


def own_outputs(package: Package, config: SessionConfig = CONFIG) -> dict[str, list[Array]]:
    """What sessions of the package's own files return."""
    return outputs(open_files(PreparedGraphs(own_files(package), cached=False), config))


def assert_same(found: dict[str, list[Array]], expected: dict[str, list[Array]]) -> None:
    """Bit for bit, and not empty."""
    assert found.keys() == expected.keys()
    for name, arrays in expected.items():
        assert len(found[name]) == len(arrays) > 0
        for ours, theirs in zip(found[name], arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def entry_of(prepared: PreparedGraphs) -> Path:
    """The folder that the packed graphs are in."""
    assert prepared.cached, prepared.reason
    (folder,) = {path.parent for path in prepared.paths.values()}
    return folder


def _write_data(file: Path, held: Mapping[str, Array]) -> dict[str, tuple[int, int]]:
    places = {}
    with file.open("wb") as opened:
        for name, array in held.items():
            places[name] = (opened.tell(), array.nbytes)
            opened.write(array.tobytes())
    return places


def _model(
    name: str, sizes: Sizes, held: Mapping[str, Array], places: Mapping[str, tuple[int, int]]
) -> onnx.ModelProto:
    """ids -> gather, norm; blocked product, fp32 product, logits over the same table; prefill: u8 product."""
    nbits = {"K": sizes.inputs, "bits": 8, "block_size": BLOCK, "accuracy_level": 4}
    table = ["table", "ids", "table_scales"]
    nodes = [
        helper.make_node(
            *("GatherBlockQuantized", table, ["rows"]),
            domain=MICROSOFT,
            **{"bits": 8, "block_size": BLOCK, "quantize_axis": 1, "gather_axis": 0},
        ),
        helper.make_node("RMSNormalization", ["rows", "norm"], ["x"], axis=-1, epsilon=1e-5),
        helper.make_node(
            *("MatMulNBits", ["x", "blocks", "blocks_scales"], ["blocked"]),
            domain=MICROSOFT,
            **nbits | {"N": sizes.outputs},
        ),
        helper.make_node("MatMul", ["x", "matrix"], ["product"]),
        helper.make_node("Reshape", ["table", "table_shape"], ["head"]),
        helper.make_node(
            *("MatMulNBits", ["x", "head", "table_scales"], ["logits"]),
            domain=MICROSOFT,
            **nbits | {"N": sizes.vocabulary},
        ),
    ]
    outputs = ["blocked", "product", "logits"]
    if name == "prefill":
        nodes += [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
            helper.make_node("MatMulInteger", ["xq", "prefill_rows", "xz", "center"], ["integers"]),
        ]
        outputs += ["integers"]
    used = {value for node in nodes for value in node.input}
    shape = np.array([sizes.vocabulary, sizes.inputs // BLOCK, BLOCK], dtype=np.int64)
    inline = {"table_shape": shape, "center": np.array(128, dtype=np.uint8)}
    tensors = [_external(key, array, places[key]) for key, array in held.items() if key in used]
    tensors += [numpy_helper.from_array(array, key) for key, array in inline.items() if key in used]
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["S"])],
        [helper.make_empty_tensor_value_info(output) for output in outputs],
        tensors,
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _external(name: str, array: Array, place: tuple[int, int]) -> TensorProto:
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", DATA), ("offset", place[0]), ("length", place[1])):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
