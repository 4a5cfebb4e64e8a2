"""Merging several weights that read one input into a single initializer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxlm.graphs.edit import add_tensor, lazy_tensor
from onnxlm.graphs.linear import Linear

# Metadata key of a merged initializer: [[parameter, first row, end row], ...].
PARTS = "onnxlm.parts"


def merge_rows(graph: ir.Graph, parts: Sequence[Linear], name: str) -> ir.Value:
    """One initializer [sum of N, K] with the rows of every part, in order.

    Args:
        graph: Where the initializer goes.
        parts: Linears in torch layout [N, K] with the same K.
        name: Name of the merged initializer.
    """
    tensors = [part.weight.const_value for part in parts]
    if any(tensor is None for tensor in tensors):
        raise ValueError(f"{name}: a part has no value")
    present = [tensor for tensor in tensors if tensor is not None]
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    merged = lazy_tensor(
        name,
        present[0].dtype,
        shape,
        lambda: np.concatenate([tensor.numpy() for tensor in present], axis=0),
    )
    value = add_tensor(graph, merged)
    rows, start = [], 0
    for part in parts:
        rows.append([part.name, start, start + part.shape[0]])
        start += part.shape[0]
    value.metadata_props[PARTS] = json.dumps(rows)
    return value


def same_input(parts: Sequence[Linear | None]) -> list[Linear] | None:
    """The parts, when all are linears in torch layout that read one value."""
    present = [part for part in parts if part is not None]
    if len(present) != len(parts) or len({part.x for part in present}) != 1:
        return None
    return None if any(part.transposed for part in present) else present
