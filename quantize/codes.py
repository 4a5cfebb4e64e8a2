"""Codes for every matrix of a package: taken over from a checkpoint, or made from smoothed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxlm.graphs.linear import linears
from onnxlm.progress import Progress
from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.experts import expert_codes, given_experts, is_routing
from onnxlm.quantize.given import fitting
from onnxlm.quantize.observed import Observed
from onnxlm.quantize.row import RowQuantized, quantize_rows
from onnxlm.quantize.schemes import Scheme
from onnxlm.quantize.smoothed import Smoothing, smooth
from onnxlm.quantize.structure import (
    LinearInput,
    embeddings,
    head_weight,
    linear_inputs,
    name_of,
)
from onnxlm.quantized_tensor import QuantizedTensor

Floats = NDArray[np.float32]


class Parameters:
    """The full-precision parameters of a graph, as [N, K] or [N], smoothed once `smoothing` is set."""

    def __init__(self, graph: ir.Graph) -> None:
        self._initializers = graph.initializers
        self._transposed = {linear.name for linear in linears(graph) if linear.transposed}
        self.smoothing = Smoothing()

    def __call__(self, name: str) -> Floats:
        """The values of one parameter; a view of the weights' file where nothing has changed them."""
        tensor = self._initializers[name].const_value
        assert tensor is not None
        values: Floats = np.asarray(tensor.numpy(), dtype=np.float32)
        return self.smoothing.apply(name, values.T if name in self._transposed else values)


@dataclass
class Codes:
    """What replaces the matrices of a package.

    Attributes:
        tensors: By the name of the weight.
        rows: One scale per row for prefill, by the same names; empty where prefill has no weights of its own.
        experts: Of a mixture's experts, [E * rows, columns], by the name of the weight.
        vectors: Parameters that smoothing has changed and that stay in full precision.
        taken_over: Weights whose codes a checkpoint has given.
    """

    tensors: dict[str, QuantizedTensor] = field(default_factory=dict)
    rows: dict[str, RowQuantized] = field(default_factory=dict)
    experts: dict[str, QuantizedTensor] = field(default_factory=dict)
    vectors: dict[str, Floats] = field(default_factory=dict)
    taken_over: frozenset[str] = frozenset()


def smooth_parameters(
    parameters: Parameters,
    inputs: Sequence[LinearInput],
    given: Mapping[str, QuantizedTensor],
    seen: Mapping[str, Statistics],
    alpha: float,
) -> None:
    """Smooth every linear input whose readers and makers are not given as codes."""
    free = [item for item in inputs if not _names(item) & given.keys()]
    parameters.smoothing = smooth(free, parameters, seen, alpha)


def make_codes(
    graph: ir.Graph,
    scheme: Scheme,
    parameters: Parameters,
    given: Mapping[str, QuantizedTensor],
    observed: Observed,
    prefill_rows: bool,
    progress: Progress,
) -> Codes:
    """Turn every matrix into codes.

    Args:
        graph: Any graph with all of the package's layers.
        scheme: How.
        parameters: The weights, smoothed.
        given: Codes that are taken over, by weight.
        observed: Statistics of the inputs.
        prefill_rows: Whether to make the one-scale-per-row form too.
        progress: Told of the layers done.
    """
    exact = given_experts(graph, given)
    codes = Codes(experts=expert_codes(graph, scheme.expert_bits, scheme.expert_block, exact))
    head = head_weight(graph)
    tables = {name_of(value) for node in embeddings(graph) for value in node.inputs[:1] if value}

    def make(name: str, statistics: Statistics | None) -> None:
        if name in given:
            codes.tensors[name] = fitting(name, given[name], parameters(name).shape)
        elif name not in codes.tensors:
            outer = name == head or name in tables
            quantize = scheme.quantize_head if outer else scheme.quantize_weight
            codes.tensors[name] = quantize(parameters(name), statistics)

    inputs = linear_inputs(graph)
    for done, item in enumerate(inputs):
        progress("quantize", done, len(inputs))
        statistics = observed.take(item.name)
        for name in dict.fromkeys(linear.name for linear in item.linears):
            if is_routing(name) and name not in given:
                continue
            make(name, statistics)
            # Not the head, which runs for one token a row; and not what reads act(gate) * up, whose channels
            # differ so much that one scale for all costs more than the rest together.
            if prefill_rows and name != head and not item.is_product:
                source = given[name].dequantize() if name in given else parameters(name)
                codes.rows[name] = quantize_rows(source)
    for name in tables:
        make(name, None)
    changed = parameters.smoothing.changed - codes.tensors.keys()
    codes.vectors = {name: parameters(name) for name in changed}
    codes.taken_over = frozenset(exact) | (given.keys() & codes.tensors.keys())
    progress("quantize", len(inputs), len(inputs))
    return codes


def _names(item: LinearInput) -> set[str]:
    """Every parameter that smoothing an input would change."""
    made = set() if item.origin is None else {rows.name for rows in item.origin.rows}
    return made | {linear.name for linear in item.linears}
