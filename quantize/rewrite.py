"""Puts codes in the place of the weights of a package's graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import onnx_ir as ir

from onnxlm.graphs.linear import Linear, linears
from onnxlm.quantize.experts import rewrite_experts
from onnxlm.quantize.fused import FusedOperators
from onnxlm.quantize.graph_edit import GraphEdit
from onnxlm.quantize.portable import PortableOperators
from onnxlm.quantize.row import RowQuantized
from onnxlm.quantize.structure import embeddings, name_of
from onnxlm.quantized_tensor import QuantizedTensor


class Operators(Protocol):
    """What replaces the layers and embeddings of one graph, by one family of operators.

    Attributes:
        SHORT_SCALES: Whether the operators take scales that a node has widened from 16 bits.
    """

    SHORT_SCALES: ClassVar[bool]

    def __init__(self, edit: GraphEdit) -> None: ...

    def layer(self, linear: Linear, tensor: QuantizedTensor, is_table: bool) -> None:
        """Replace a layer; `is_table` where an embedding reads the same codes."""

    def rows(self, linear: Linear, tensor: RowQuantized) -> None:
        """Replace a layer by one with one scale per row."""

    def embedding(self, gather: ir.Node, name: str, tensor: QuantizedTensor) -> None:
        """Replace an embedding whose table is called `name`."""


_OPERATORS: Mapping[str, type[Operators]] = {"ort": FusedOperators, "portable": PortableOperators}
LOWERINGS = tuple(_OPERATORS)


class Rewriter:
    """Puts quantized operators into the graphs of one package; what they share is stored once.

    Args:
        tensors: Codes by the name of the weight that they replace.
        lowering: "ort" or "portable", the operators that the graphs are made of.
        experts: Codes of experts by the name of the weight.
        half: Whether the graphs' activations are float16.
    """

    def __init__(
        self,
        tensors: Mapping[str, QuantizedTensor],
        lowering: str = "ort",
        experts: Mapping[str, QuantizedTensor] | None = None,
        half: bool = False,
    ) -> None:
        self._half = half
        self._tensors = tensors
        self._experts = experts or {}
        self._make = _OPERATORS[lowering]
        self._stored: dict[str, ir.TensorProtocol] = {}

    def rewrite(self, graph: ir.Graph, rows: Mapping[str, RowQuantized] | None = None) -> None:
        """Replace every layer and embedding whose weight has codes.

        Args:
            graph: The graph, changed in place; the weights stay, unread.
            rows: Weights that this graph reads with one scale per row instead, by the same names.
        """
        edit = GraphEdit(graph, self._stored, self._make.SHORT_SCALES, self._half)
        operators = self._make(edit)
        rewrite_experts(edit, graph, self._experts)
        tables = set()
        for gather in embeddings(graph):
            table = gather.inputs[0]
            assert table is not None
            name = name_of(table)
            if name in self._tensors:
                operators.embedding(gather, name, self._tensors[name])
                tables.add(name)
        for linear in linears(graph):
            name = linear.name
            if rows and name in rows:
                operators.rows(linear, rows[name])
            elif name in self._tensors:
                operators.layer(linear, self._tensors[name], name in tables)
