"""Eager module -> traced program -> ONNX graph with the project's names, before any pass."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_SAMPLE_BATCH, _SAMPLE_NEW, _SAMPLE_PAST, _SAMPLE_WINDOW_PAST = 2, 5, 11, 4


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


@dataclass(frozen=True)
class _Part:
    """A state of a layer: its name there, its (heads, width), and whether older tokens may be left out."""

    layer: int
    name: str
    shape: tuple[int, int]
    windowed: bool

    @property
    def past(self) -> str:
        return io_spec.past_name(self.layer, self.name)

    @property
    def present(self) -> str:
        return io_spec.present_name(self.layer, self.name)

    def sample(self) -> tuple[int, int, int]:
        """Heads, columns and width of the sample."""
        return self.shape[0], _SAMPLE_WINDOW_PAST if self.windowed else _SAMPLE_PAST, self.shape[1]


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
    kept = zip(model.state_shapes, model.windows, strict=True)
    parts = [
        _Part(layer, name, shape, bool(window))
        for layer, (shapes, window) in enumerate(kept)
        for name, shape in shapes.items()
    ]
    past = [
        weight.new_zeros((_SAMPLE_BATCH, heads, columns, width))
        for heads, columns, width in map(_Part.sample, parts)
    ]
    ids = torch.zeros((_SAMPLE_BATCH, _SAMPLE_NEW), dtype=torch.int64)
    mask = torch.ones((_SAMPLE_BATCH, _SAMPLE_PAST + _SAMPLE_NEW), dtype=torch.int64)
    dynamic = torch.export.Dim.DYNAMIC
    # One name, one symbol: what is worked out from it is worked out once for all layers.
    columns = {True: torch.export.Dim("window_past"), False: dynamic}
    rows_and_columns = {0: dynamic, 1: dynamic}
    shapes = {
        "input_ids": rows_and_columns,
        "attention_mask": rows_and_columns,
        "past": [{0: dynamic, 2: columns[part.windowed]} for part in parts],
    }
    with _quiet(), torch.no_grad():
        program = torch.export.export(
            FlatDecoder(model).eval(), (ids, mask, past), dynamic_shapes=shapes, strict=False
        )
        with _among_decompositions(lowering):
            exported = _to_onnx(program, lowering.opset)
    graph_model: ir.Model = exported.model
    _name_inputs_and_outputs(graph_model.graph, parts)
    _name_axes(graph_model.graph, {part.past: part.windowed for part in parts})
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


def _name_inputs_and_outputs(graph: ir.Graph, parts: Sequence[_Part]) -> None:
    inputs = [io_spec.INPUT_IDS, io_spec.ATTENTION_MASK, *(part.past for part in parts)]
    outputs = [io_spec.LOGITS, *(part.present for part in parts)]
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name


def _name_axes(graph: ir.Graph, windowed: Mapping[str, bool]) -> None:
    """Replace the tracer's symbols (s72) by the project's axis names, in every recorded shape.

    Args:
        graph: Its inputs and outputs have their names.
        windowed: Of each past, whether it may lack older tokens.
    """
    expected: dict[str, tuple[str | None, ...]] = {
        io_spec.INPUT_IDS: (io_spec.BATCH, io_spec.SEQUENCE),
        io_spec.ATTENTION_MASK: (io_spec.BATCH, io_spec.TOTAL),
    }
    for past, short in windowed.items():
        columns = io_spec.WINDOW_PAST if short else io_spec.PAST
        expected[past] = (io_spec.BATCH, None, columns, None)
    symbols: dict[str, str] = {}
    for value in graph.inputs:
        for dim, name in zip(_shape(value), expected[value.name or ""], strict=True):
            if isinstance(dim, ir.SymbolicDim) and name is not None:
                symbols[str(dim.value)] = name
    grown = {
        sum_: _TOTALS[a]
        for symbol, a in symbols.items()
        for other, b in symbols.items()
        if a in _TOTALS and b == io_spec.SEQUENCE
        for sum_ in (f"{symbol} + {other}", f"{other} + {symbol}")
    }
    values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([_rename_axis(dim, symbols | grown) for dim in value.shape])


# What a past is with the new columns behind it: the one sum of two axes in these graphs.
_TOTALS = {io_spec.PAST: io_spec.TOTAL, io_spec.WINDOW_PAST: io_spec.WINDOW_TOTAL}


def _rename_axis(dim: Any, names: Mapping[str, str]) -> Any:
    return names.get(str(dim.value)) if isinstance(dim, ir.SymbolicDim) else dim


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
