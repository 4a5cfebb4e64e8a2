"""Eager module -> traced program -> ONNX graph with the project's names, before any pass."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table

from onnxlm import io_spec
from onnxlm.errors import ExportError
from onnxlm.export.lowerings import Lowering
from onnxlm.models.layers.decoder import DecoderLM

# Sizes of the sample that is traced. All distinct, so that no axis can be mistaken for another.
_SAMPLE_BATCH, _SAMPLE_NEW, _SAMPLE_PAST = 2, 5, 3


class FlatDecoder(nn.Module):
    """Gives a decoder flat tensors in and out, as a graph has them."""

    def __init__(self, model: DecoderLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """`past` holds every layer's states in order; returns logits, then presents in the same order."""
        states = iter(past)
        caches = [tuple(next(states) for _ in kept) for kept in self.model.state_shapes]
        logits, present = self.model(input_ids, attention_mask, caches)
        return logits.float(), *(tensor for cache in present for tensor in cache)


def trace(model: DecoderLM, lowering: Lowering) -> ir.Model:
    """Trace a decoder once, for any batch, any number of new tokens and any past.

    Args:
        model: The eager reference in evaluation mode; its weights are referred to, not copied.
        lowering: How custom ops are spelled.

    Returns:
        A graph with inputs `input_ids`, `attention_mask` and the past, outputs `logits`
        [batch_size, sequence_length, vocab_size] and the present, every initializer under its
        parameter's name.
    """
    weight = model.embed_tokens.weight
    parts = [
        (layer, part, shape)
        for layer, kept in enumerate(model.state_shapes)
        for part, shape in kept.items()
    ]
    past = [
        weight.new_zeros((_SAMPLE_BATCH, heads, _SAMPLE_PAST, width))
        for _, _, (heads, width) in parts
    ]
    ids = torch.zeros((_SAMPLE_BATCH, _SAMPLE_NEW), dtype=torch.int64)
    mask = torch.ones((_SAMPLE_BATCH, _SAMPLE_PAST + _SAMPLE_NEW), dtype=torch.int64)
    dynamic = torch.export.Dim.DYNAMIC
    rows_and_columns = {0: dynamic, 1: dynamic}
    shapes = {
        "input_ids": rows_and_columns,
        "attention_mask": rows_and_columns,
        "past": [{0: dynamic, 2: dynamic}] * len(parts),
    }
    with _quiet(), torch.no_grad():
        program = torch.export.export(
            FlatDecoder(model).eval(), (ids, mask, past), dynamic_shapes=shapes, strict=False
        )
        with _among_decompositions(lowering):
            exported = _to_onnx(program, lowering.opset)
    graph_model: ir.Model = exported.model
    _name_inputs_and_outputs(graph_model.graph, [(layer, part) for layer, part, _ in parts])
    _name_axes(graph_model.graph)
    _name_initializers(graph_model.graph)
    return graph_model


def _to_onnx(program: torch.export.ExportedProgram, opset: int) -> torch.onnx.ONNXProgram:
    """Raises: ExportError: A lowering refuses what the program asks for."""
    try:
        exported = torch.onnx.export(
            program, (), dynamo=True, opset_version=opset, optimize=False, verbose=False
        )
    except Exception as error:
        # The exporter wraps what a lowering has to say.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ExportError):
            cause = cause.__cause__ or cause.__context__
        raise (cause or error) from None
    if exported is None:
        raise RuntimeError("torch.onnx.export returned nothing for a traced program")
    return exported


@contextlib.contextmanager
def _among_decompositions(lowering: Lowering) -> Iterator[None]:
    """Have the exporter spell the custom ops while it takes the others apart.

    It decomposes a program in any case. Doing so twice, first with the lowering's own table, made a trace a
    third to a half longer.
    """
    with mock.patch.dict(decomposition_table, lowering.decompositions):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's own progress text and deprecation chatter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _name_inputs_and_outputs(graph: ir.Graph, parts: Sequence[tuple[int, str]]) -> None:
    inputs = [
        io_spec.INPUT_IDS,
        io_spec.ATTENTION_MASK,
        *(io_spec.past_name(i, part) for i, part in parts),
    ]
    outputs = [io_spec.LOGITS, *(io_spec.present_name(i, part) for i, part in parts)]
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name


def _name_axes(graph: ir.Graph) -> None:
    """Replace the tracer's symbols (s72) by the project's axis names, in every recorded shape."""
    expected: dict[str, tuple[str | None, ...]] = {
        io_spec.INPUT_IDS: (io_spec.BATCH, io_spec.SEQUENCE),
        io_spec.ATTENTION_MASK: (io_spec.BATCH, io_spec.TOTAL),
    }
    past = (io_spec.BATCH, None, io_spec.PAST, None)
    symbols: dict[str, str] = {}
    for value in graph.inputs:
        for dim, name in zip(_shape(value), expected.get(value.name or "", past), strict=True):
            if isinstance(dim, ir.SymbolicDim) and name is not None:
                symbols[str(dim.value)] = name
    grown = {f"{a} + {b}" for a in symbols for b in symbols}
    values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([_rename_axis(dim, symbols, grown) for dim in value.shape])


def _rename_axis(dim: Any, symbols: dict[str, str], grown: set[str]) -> Any:
    if not isinstance(dim, ir.SymbolicDim):
        return dim
    if str(dim.value) in symbols:
        return symbols[str(dim.value)]
    # The one sum of two axes in these graphs is past + new.
    return io_spec.TOTAL if str(dim.value) in grown else None


def _shape(value: ir.Value) -> ir.Shape:
    if value.shape is None:
        raise RuntimeError(f"the tracer gave {value.name} no shape")
    return value.shape


def _name_initializers(graph: ir.Graph) -> None:
    """Strip the wrapper's prefix, so that an initializer has its parameter's name.

    A tied head and embedding are one initializer; it keeps the embedding's name.
    """
    gathered = {node.inputs[0] for node in graph if node.op_type == "Gather"}
    for value in list(graph.initializers.values()):
        name = (value.name or "").removeprefix("model.")
        if name == "lm_head.weight" and value in gathered:
            name = "embed_tokens.weight"
        value.name = name
