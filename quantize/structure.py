"""What a graph's linear layers read, and which rows of which parameters make the channels of it.

Legend: K channels of an input, H query heads, Hkv key-value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxlm import io_spec
from onnxlm.graphs.edit import MICROSOFT, is_op, only_user, producer
from onnxlm.graphs.linear import Linear, as_linear, linears, projection

# Operator -> which of its inputs are the weight and the bias that make the channels of its outcome.
_NORMS = {
    ("", "RMSNormalization"): (1, None),
    ("", "LayerNormalization"): (1, 2),
    ("", "SimplifiedLayerNormalization"): (1, None),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): (2, None),
    (MICROSOFT, "SkipLayerNormalization"): (2, 3),
}


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `end` of the parameter `name`, which is [N, K] or [N]."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Origin:
    """Dividing these rows by a scale divides the channels of a linear input by it, and nothing else.

    Attributes:
        rows: As many rows of each parameter.
        heads: (H, Hkv, D) when one row makes the channels of a group of query heads.
    """

    rows: tuple[Rows, ...]
    heads: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class LinearInput:
    """One value that linear layers read.

    Attributes:
        value: The value [..., K].
        linears: Every linear that reads it.
        origin: What makes its channels; None where that cannot be scaled, or is not known.
    """

    value: ir.Value
    linears: tuple[Linear, ...]
    origin: Origin | None

    @property
    def name(self) -> str:
        """The value's name."""
        return name_of(self.value)

    @property
    def is_product(self) -> bool:
        """Whether it is act(gate) * up."""
        return is_op(self.value.producer(), "Mul")


def linear_inputs(graph: ir.Graph) -> list[LinearInput]:
    """Every distinct input of the graph's linears, in graph order."""
    readers: dict[ir.Value, list[Linear]] = {}
    for linear in linears(graph):
        readers.setdefault(linear.x, []).append(linear)
    return [
        LinearInput(value, tuple(found), _origin(value, found)) for value, found in readers.items()
    ]


def embeddings(graph: ir.Graph) -> list[ir.Node]:
    """Every Gather of a stored table's rows by the input's tokens."""
    return [node for node in graph if is_op(node, "Gather") and _is_embedding(node)]


def head_weight(graph: ir.Graph) -> str | None:
    """The weight of the layer that makes the logits, whatever is done to them behind it."""
    value = next((v for v in graph.outputs if v.name == io_spec.LOGITS), None)
    while value is not None and (node := value.producer()) is not None:
        linear = as_linear(node)
        if linear is not None:
            return linear.name
        value = next((v for v in node.inputs if v is not None and v.producer() is not None), None)
    return None


def name_of(value: ir.Value) -> str:
    """The name that every value of a loaded graph has."""
    assert value.name is not None
    return value.name


def _is_embedding(gather: ir.Node) -> bool:
    table, ids = gather.inputs
    axis = gather.attributes.get("axis")
    if table is None or ids is None or table.shape is None or len(table.shape) != 2:
        return False
    return (
        ids.name == io_spec.INPUT_IDS
        and table.is_initializer()
        and (axis is None or axis.as_int() == 0)
    )


def _origin(value: ir.Value, readers: list[Linear]) -> Origin | None:
    nodes = {linear.node for linear in readers}
    if value.is_graph_output() or any(node not in nodes for node, _ in value.uses()):
        return None
    if not all(linear.owns_weight for linear in readers):
        return (
            None  # another reader of the weight, such as an embedding, would see its columns scaled
        )
    node = value.producer()
    if node is None or value is not node.outputs[0]:
        return None
    columns = readers[0].shape[1]
    origin = _made_by(node, columns)
    if origin is None:
        return None
    heads, _, width = origin.heads or (1, 1, origin.rows[0].end - origin.rows[0].start)
    # A factor may be one column for all channels.
    return origin if heads * width == columns else None


def _made_by(node: ir.Node, columns: int) -> Origin | None:
    places = _NORMS.get((node.domain, node.op_type))
    if places is not None:
        return _norm_rows(node, places)
    if is_op(node, "GroupQueryAttention", MICROSOFT):
        return _value_rows(node)
    if is_op(node, "Reshape"):
        return _attended_rows(node, columns)
    return _factor_rows(node) if is_op(node, "Mul") else None


def _norm_rows(node: ir.Node, places: tuple[int, int | None]) -> Origin | None:
    rows = []
    for place in places:
        value = node.inputs[place] if place is not None and place < len(node.inputs) else None
        if value is None:
            continue
        if not _is_own_vector(value):
            return None
        rows.append(_all_rows(value))
    return Origin(tuple(rows)) if rows else None


def _is_own_vector(value: ir.Value) -> bool:
    """Whether `value` is a stored vector that one node reads."""
    stored = value.is_initializer() and not value.is_graph_input() and only_user(value) is not None
    return stored and value.shape is not None and len(value.shape) == 1


def _all_rows(value: ir.Value) -> Rows:
    assert value.shape is not None
    return Rows(name_of(value), 0, value.shape.numpy()[0])


def _value_rows(attention: ir.Node) -> Origin | None:
    """Rows of the V projection: attention mixes positions, never the channels of a head."""
    heads = attention.attributes["num_heads"].as_int()
    kv_heads = attention.attributes["kv_num_heads"].as_int()
    if any(cache.uses() for cache in attention.outputs[1:]):
        return None  # a later layer attends to the same values
    packed, separate = attention.inputs[0], attention.inputs[2]
    source = packed if separate is None else separate
    made = _layer_rows(source)
    if made is None:
        return None
    total = made[0].end
    width = total // (kv_heads if separate is not None else heads + 2 * kv_heads)
    values = tuple(Rows(rows.name, total - kv_heads * width, total) for rows in made)
    return Origin(values, (heads, kv_heads, width))


def _attended_rows(joined: ir.Node, columns: int) -> Origin | None:
    """The same in standard operators: heads are split in front of Attention, and joined by a Reshape."""
    attention = producer(_unturned(joined.inputs[0]), "Attention")
    values = None if attention is None else attention.inputs[2]
    cached = producer(values, "Concat")
    if values is None or cached is None or len(values.uses()) != 1:
        return None
    past, new = cached.inputs
    split = producer(_unturned(new), "Reshape")
    made = None if split is None else _layer_rows(split.inputs[0])
    if made is None or past is None or past.shape is None or not past.is_graph_input():
        return None
    kv_heads, width = past.shape[1], past.shape[3]
    if not isinstance(kv_heads, int) or not isinstance(width, int):
        return None
    if made[0].end != kv_heads * width:
        return None
    return Origin(made, (columns // width, kv_heads, width))


def _unturned(value: ir.Value | None) -> ir.Value | None:
    """What a Transpose that swaps positions and heads turns into `value`."""
    turn = producer(value, "Transpose")
    if turn is None or value is None or len(value.uses()) != 1:
        return None
    perm = turn.attributes.get("perm")
    return turn.inputs[0] if perm is not None and list(perm.as_ints()) == [0, 2, 1, 3] else None


def _factor_rows(product: ir.Node) -> Origin | None:
    """Rows of the layer that makes a factor of act(gate) * up, read by nothing else."""
    for value in reversed(product.inputs):
        made = _split_rows(value) or _layer_rows(value)
        if made is not None:
            return Origin(made)
    return None


def _split_rows(value: ir.Value | None) -> tuple[Rows, ...] | None:
    """The part of a merged layer's rows that one output of a Split is."""
    split = None if value is None else value.producer()
    if value is None or split is None or not is_op(split, "Split") or len(value.uses()) != 1:
        return None
    axis, sizes = split.attributes.get("axis"), split.inputs[1] if len(split.inputs) > 1 else None
    if axis is None or axis.as_int() != -1 or sizes is None or sizes.const_value is None:
        return None
    made = _layer_rows(split.inputs[0])
    if made is None:
        return None
    index = split.outputs.index(value)
    ends = sizes.const_value.numpy().cumsum().tolist()
    start = ends[index - 1] if index else 0
    return tuple(Rows(rows.name, start, ends[index]) for rows in made)


def _layer_rows(value: ir.Value | None) -> tuple[Rows, ...] | None:
    """All rows of the layer that makes `value`, those of its bias too; None when it is read twice."""
    layer = projection(value)
    if layer is None or len(layer.y.uses()) != 1 or not layer.linear.owns_weight:
        return None
    count = layer.linear.shape[0]
    rows = [Rows(layer.linear.name, 0, count)]
    if layer.bias is not None:
        if not _is_own_vector(layer.bias):
            return None
        rows.append(Rows(name_of(layer.bias), 0, count))
    return tuple(rows)
