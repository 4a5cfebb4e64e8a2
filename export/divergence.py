"""Where a graph leaves the model: the residual stream behind every layer, graph against eager model.

Shapes: L layers, n tokens of a row in the last call, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxlm import io_spec
from onnxlm.calls import Calls, Floats, Reference, Runner
from onnxlm.errors import ExportError
from onnxlm.proof import Divergence
from onnxlm.tolerances import Tolerance

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Skip*LayerNormalization adds, normalises, and returns the sum as its fourth output.
_SUM = 3


def find_divergence(
    check: str,
    runner: Runner,
    reference: Reference,
    graph: Path,
    failed: tuple[Calls, int],
    tolerance: Tolerance,
) -> Divergence | None:
    """The first place behind which the last of some calls differs from the eager model.

    Args:
        check: What the calls are called.
        runner: Runs the package.
        reference: The eager model.
        graph: File of the graph that the last call runs.
        failed: Calls whose last has wrong logits, and a row where it has.
        tolerance: Bounds the hidden states of each token by that token's own largest value.

    Returns:
        None where the reference does not show its hidden states.
    """
    calls, row = failed
    ids = calls.tokens(row)
    streams = reference.hidden(ids)
    if streams is None:
        return None
    new = slice(len(ids) - calls.last(row), None)
    expected = [*streams, reference.logits(ids)]
    probe, names = probe_graph(graph, len(streams) - 1)
    found = runner.values(calls, probe, [*names, io_spec.LOGITS])[row]
    places = ["the embedding", *(f"layer {i}" for i in range(len(streams) - 1)), "the head"]
    differences = {
        place: relative_difference(value, theirs[new])
        for place, value, theirs in zip(places, found.values(), expected, strict=True)
    }
    # `not <=`: a NaN is a difference too.
    place = next((p for p, d in differences.items() if not d <= tolerance.bound), None)
    layer = places.index(place) - 1 if place and place.startswith("layer") else None
    return Divergence(check, calls.graph, place, layer, tolerance.bound, differences)


def relative_difference(ours: Floats, theirs: Floats) -> float:
    """Largest difference at any token, relative to the token's own largest value where that is above 1.

    Not to the largest of all tokens: some models carry values of thousands at a text's first token only.

    Args:
        ours: [n, width].
        theirs: [n, width].
    """
    difference = np.abs(ours.astype(np.float64) - theirs).max(axis=1)
    return float((difference / np.maximum(1.0, np.abs(theirs).max(axis=1))).max())


def probe_graph(file: Path, layers: int) -> tuple[bytes, list[str]]:
    """A graph that also returns the residual stream before its first layer and behind each.

    Args:
        file: The .onnx file; its weights stay where they are and are not read.
        layers: L.

    Returns:
        The model, and the names of the L + 1 outputs [B, S, H], in order.

    Raises:
        ExportError: The graph does not name its parameters by their layers.
    """
    model = ir.load(file)
    streams = list(_streams(model.graph, layers))
    if len(streams) != layers + 1:
        raise ExportError(
            f"{file}: the layers cannot be told apart by the names of their parameters",
            found=f"{len(streams)} places between layers",
            allowed=layers + 1,
        )
    for index, value in enumerate(streams):
        value.name = value.name or f"residual_stream.{index}"
        value.type = value.type or model.graph.outputs[0].type
        if value not in model.graph.outputs:
            model.graph.outputs.append(value)
    return ir.to_proto(model).SerializeToString(), [str(value.name) for value in streams]


def _streams(graph: ir.Graph, layers: int) -> Iterator[ir.Value]:
    """What the first node of each layer takes in, and then the first node behind the last layer.

    By the names of parameters, which every rewrite keeps, and in the order of the nodes: whatever a layer
    is made of, what its first node reads is what the layer before gave.
    """
    wanted = 0
    for node in graph:
        owner = _owner(node, layers)
        if owner is None or not _reads_activation(node):
            continue
        if owner == wanted:
            wanted += 1
            yield _incoming(node)
        if wanted > layers:
            return


def _owner(node: ir.Node, layers: int) -> int | None:
    """The layer whose parameter a node reads; `layers` for one that belongs to none (the final norm)."""
    for value in node.inputs:
        if value is None or not value.is_initializer() or value.dtype is None or not value.shape:
            continue
        found = _LAYER.search(value.name or "")
        if found:
            return int(found[1])
        if (value.name or "").endswith((".weight", ".bias")):
            return layers
    return None


def _reads_activation(node: ir.Node) -> bool:
    """Whether the node's first input is computed from the tokens, [B, S, width]."""
    value = node.inputs[0]
    if value is None or value.producer() is None:
        return False
    return value.shape is not None and len(value.shape) == 3


def _incoming(node: ir.Node) -> ir.Value:
    if not node.op_type.startswith("Skip"):
        value = node.inputs[0]
        assert value is not None
        return value
    if len(node.outputs) <= _SUM:
        node.resize_outputs(_SUM + 1)
    total = node.outputs[_SUM]
    total.type = total.type or node.outputs[0].type
    return total
