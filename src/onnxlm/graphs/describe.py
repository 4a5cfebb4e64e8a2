"""Graphs as a manifest describes them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxlm.io_spec import TensorSpec
from onnxlm.manifest import GraphSpec


def describe(file: str, model: ir.Model, fusions: Mapping[str, int]) -> GraphSpec:
    """The manifest's entry for one graph file."""
    return GraphSpec(
        file=file,
        inputs=tuple(_tensor(value) for value in model.graph.inputs),
        outputs=tuple(_tensor(value) for value in model.graph.outputs),
        opset_imports=dict(model.graph.opset_imports),
        fusions=dict(fusions),
    )


def _tensor(value: ir.Value) -> TensorSpec:
    if value.name is None or value.shape is None or value.dtype is None:
        raise ValueError(f"graph input or output {value.name} has no type or shape")
    dims = tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape)
    return TensorSpec(value.name, value.dtype.numpy().name, dims)
