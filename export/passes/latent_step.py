"""A step of attention to one latent vector a token, as two products over all heads.

GroupQueryAttention reads the whole cache once for each query head. Where all heads read one key-value head,
they are rows of one matrix: scores = q @ cache^T and y = softmax(scores) @ cache read it twice in all. The
operator stays, with one head and a window of one column, as what puts the new token into the cache in place.

Measured on one thread of a Xeon (Sapphire Rapids) at a width of 576, CPU ms a layer and token, before and
after: 16 heads, 64 cached tokens 0.17 and 0.17, 512 1.5 and 0.6, 4096 15.9 and 5.1; 64 heads, 4096 82 and 12.

Products go over a buffer's unused columns too, which the mask hides: they must hold numbers. Full precision
only: there is no product in fp16 on every CPU, and the cache would be converted at every step.

Legend of shapes: B rows, H query heads, D width of the latent vector, T columns of the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxlm.export.passes._scores import unscaled
from onnxlm.graphs.edit import MICROSOFT, add_constant, is_op, move, new_node

_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _LENGTHS = range(6)
# Behind lengths and total: tables, positions, bias, sinks.
_FURTHER = 7
_OFF = {"softcap": 0.0, "do_rotary": 0, "local_window_size": -1, "smooth_softmax": 0}


def apply(model: ir.Model) -> int:
    """Returns the number of attention nodes that write the cache only."""
    masks: dict[ir.Value, ir.Value] = {}
    count = 0
    for node in list(model.graph):
        if _is_latent_step(node):
            _rewrite(model.graph, node, masks)
            count += 1
    return count


def _is_latent_step(node: ir.Node) -> bool:
    """Whether one query a row and head attends to one cache that is key and value, with nothing special."""
    if not is_op(node, "GroupQueryAttention", MICROSOFT):
        return False
    query, past, key = (node.inputs[i] for i in (_QUERY, _PAST_KEY, _KEY))
    if query is None or query.shape is None or query.dtype != ir.DataType.FLOAT:
        return False
    if past is None or _width(past) is None or key is None:
        return False
    one_cache = past is node.inputs[_PAST_VALUE] and key is node.inputs[_VALUE]
    heads, groups = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    return one_cache and query.shape[1] == 1 and heads > 1 == groups and _is_plain(node)


def _is_plain(node: ir.Node) -> bool:
    """Whether scores are scaled products of all columns, and nothing else."""
    further = any(value is not None for value in node.inputs[_FURTHER:])
    given = {name: node.attributes[name].value for name in _OFF if name in node.attributes}
    return not further and given.items() <= _OFF.items()


def _width(cache: ir.Value | None) -> int | None:
    width = None if cache is None or cache.shape is None else cache.shape[3]
    return width if isinstance(width, int) else None


def _rewrite(graph: ir.Graph, node: ir.Node, masks: dict[ir.Value, ir.Value]) -> None:
    query, key, lengths, past = (node.inputs[i] for i in (_QUERY, _KEY, _LENGTHS, _PAST_KEY))
    mixed, present = node.outputs[:2]
    heads, width = node.attributes["num_heads"].as_int(), _width(past)
    assert lengths is not None
    assert width is not None
    assert key is not None
    emit = _Emitter(graph, node)
    if lengths not in masks:
        masks[lengths] = _mask(emit, present, lengths)
    given = node.attributes["scale"].as_float() if "scale" in node.attributes else 0.0
    scale = given or width**-0.5
    rows = emit("Reshape", query, emit.integers(0, 1, heads, width))  # [B, 1, H, D]
    scores = emit("FusedMatMul", rows, present, domain=MICROSOFT, transB=1, alpha=scale)
    shares = emit("Softmax", emit("Add", scores, masks[lengths]), axis=-1)  # [B, 1, H, T]
    sums = emit("MatMul", shares, present)
    move(graph, mixed, emit("Reshape", sums, emit.integers(0, 1, heads * width)))  # [B, 1, H * D]
    mixed.name = f"{present.name}.unread"
    mixed.shape = key.shape  # of one head, that of the query that it now has
    node.replace_input_with(_QUERY, key)
    node.attributes["num_heads"] = ir.AttrInt64("num_heads", 1)
    node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 1)
    unscaled(node)  # nobody reads its scores


def _mask(emit: _Emitter, present: ir.Value, lengths: ir.Value) -> ir.Value:
    """[B, 1, 1, T] that is added to scores: 0 up to column `lengths` [B], the new token's, -inf behind it."""
    total = emit("Cast", emit("Shape", present, start=2, end=3), to=ir.DataType.INT32.value)
    zero, one = emit.scalar("int32_0", np.int32(0)), emit.scalar("int32_1", np.int32(1))
    columns = emit("Range", zero, emit("Squeeze", total), one)
    behind = emit("Greater", columns, emit("Reshape", lengths, emit.integers(-1, 1, 1, 1)))
    hidden, seen = np.float32(-np.inf), np.float32(0)
    return emit("Where", behind, emit.scalar("minus_inf", hidden), emit.scalar("float_0", seen))


class _Emitter:
    """Puts nodes behind `anchor`, each behind the one before."""

    def __init__(self, graph: ir.Graph, anchor: ir.Node) -> None:
        self._graph, self._last = graph, anchor
        self._stem = anchor.outputs[1].name

    def __call__(
        self, op: str, *inputs: ir.Value | None, domain: str = "", **attributes: object
    ) -> ir.Value:
        given: Mapping[str, object] = attributes
        node = new_node(op, inputs, domain=domain, attributes=given)
        self._graph.insert_after(self._last, node)
        self._last = node
        node.outputs[0].name = f"{self._stem}.{op.lower()}_{len(self._graph)}"
        return node.outputs[0]

    def integers(self, *values: int) -> ir.Value:
        name = "shape_" + "_".join(map(str, values))
        return add_constant(self._graph, name, np.array(values, dtype=np.int64))

    def scalar(self, name: str, value: np.generic) -> ir.Value:
        return add_constant(self._graph, name, np.array(value))
