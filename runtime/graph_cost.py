"""What a graph must at least do: weights to read and multiplications by them, node by node.

Attention over the cache, norms and the like are left out: what counts here is what a roofline can bound.
Shapes: B rows, S new tokens a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnxlm.runtime.graph_reader import Constant, Graph, Node

EMBEDDING, HEAD = "embedding", "head"
# Parameters keep their names through every rewrite; a cache is numbered by its layer.
_LAYER = re.compile(r"(?:^|\.)(?:layers|past_key_values)\.(\d+)\.")
# Of their tables (embeddings, the cosines of positions) these read a row a token.
_LOOKUPS = {"Gather", "GatherBlockQuantized", "GroupQueryAttention", "RotaryEmbedding"}
# Of constants these make constants: ONNX Runtime computes them, or takes them in, when it loads a graph.
_FOLDED = {"DequantizeLinear", "Reshape", "Cast", "Transpose", "Identity"}
_PRODUCTS = {
    *("MatMul", "FusedMatMul", "Gemm", "MatMulInteger", "MatMulIntegerToFloat"),
    "DynamicQuantizeMatMul",
}


@dataclass(frozen=True)
class NodeCost:
    """What one node must do.

    Attributes:
        op_type: Its operator.
        place: "embedding", "layer 0" and so on, or "head".
        weight_bytes: Constants that it reads, of any number of tokens.
        flops_per_token: Multiplications and additions by weights.
    """

    op_type: str
    place: str
    weight_bytes: int = 0
    flops_per_token: int = 0


@dataclass(frozen=True)
class Work:
    """What one call of a graph must do.

    Attributes:
        bytes: Weights, read once.
        flops: Multiplications and additions by weights.
    """

    bytes: int
    flops: int

    def least_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds that it takes at the least, where reading and computing overlap perfectly."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def node_costs(graph: Graph) -> dict[str, NodeCost]:
    """The cost of every node, by its name."""
    known = dict(graph.constants)
    costs: dict[str, NodeCost] = {}
    place = EMBEDDING
    for node in graph.nodes:
        weights = [known[name] for name in node.inputs if name in known]
        size = sum(weight.bytes for weight in weights)
        if node.op_type in _FOLDED and node.inputs and node.inputs[0] in known:
            known |= {name: Constant(weights[0].dims, size) for name in node.outputs}
            costs[node.name] = NodeCost(node.op_type, _place(node, graph, place))
            continue
        # A node that names no layer is where the node before it is.
        place = _place(node, graph, place)
        read = 0 if node.op_type in _LOOKUPS else size
        costs[node.name] = NodeCost(node.op_type, place, read, _flops(node, weights))
    return costs


def work_of(costs: Mapping[str, NodeCost], batch: int, tokens: int) -> Work:
    """What one call must do.

    Args:
        costs: Of its nodes.
        batch: B.
        tokens: S; the head runs on the last of each row alone.
    """
    flops = sum(node_flops(cost, batch, tokens) for cost in costs.values())
    return Work(sum(cost.weight_bytes for cost in costs.values()), flops)


def node_flops(cost: NodeCost, batch: int, tokens: int) -> int:
    """Multiplications and additions of one node in one call; arguments as in `work_of`."""
    return cost.flops_per_token * batch * (1 if cost.place == HEAD else tokens)


def _flops(node: Node, weights: list[Constant]) -> int:
    if node.op_type == "MatMulNBits":
        return 2 * node.integers["K"] * node.integers["N"]
    if node.op_type in _PRODUCTS:
        return 2 * max((weight.elements for weight in weights if len(weight.dims) > 1), default=0)
    return 0


def _place(node: Node, graph: Graph, before: str) -> str:
    """Where a node is, by the names of what it reads, when the one before it is at `before`."""
    for name in node.inputs:
        found = _LAYER.search(name)
        if found:
            return f"layer {found[1]}"
    parameters = (name for name in node.inputs if name.endswith((".weight", ".bias")))
    if before != EMBEDDING and any(name in graph.constants for name in parameters):
        return HEAD
    return before
