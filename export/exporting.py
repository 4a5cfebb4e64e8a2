"""Checkpoint -> package of full-precision graphs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
import torch

from onnxlm import __version__, io_spec
from onnxlm.errors import ExportError
from onnxlm.export.lowerings import find_lowering
from onnxlm.export.passes._merge import PARTS
from onnxlm.export.pipeline import BuiltGraph, build_graphs
from onnxlm.export.tracing import trace
from onnxlm.graphs.describe import describe
from onnxlm.graphs.linear import linears
from onnxlm.graphs.weights_file import write_graphs
from onnxlm.io_spec import StateSpec
from onnxlm.manifest import Manifest, ParameterSpec, Producer, WeightsSpec
from onnxlm.models.checkpoint import Checkpoint, read
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.loading import load
from onnxlm.package import Package, PackageWriter, check_destination
from onnxlm.progress import Progress, silent

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_LIBRARIES = ("torch", "onnx", "onnx-ir", "onnxscript", "transformers")


def export(
    source: str | Path | Checkpoint,
    out: str | Path,
    *,
    precision: str = "fp32",
    lowering: str = "ort",
    progress: Progress = silent,
) -> Package:
    """Cast a checkpoint into a package of prefill and decode graphs in full precision.

    Args:
        source: What `onnxlm.models.checkpoint.read` accepts, or what it returned.
        out: A new folder, an empty one, or a package, which is replaced when the new one is whole.
        precision: "fp32" or "fp16".
        lowering: "ort" (fused operators of ONNX Runtime), "portable" (standard ONNX only) or "plain" (no
            operator that is newer than opset 21).
        progress: Told of the stages.

    Raises:
        CheckpointError, ConfigError: The source is damaged or not supported.
        ExportError: The request makes no sense or `out` cannot be written.
    """
    if precision not in _DTYPES:
        raise ExportError("precision", found=repr(precision), allowed=", ".join(_DTYPES))
    chosen = find_lowering(lowering)
    check_destination(out)
    progress("read checkpoint", 0, 0)
    checkpoint = source if isinstance(source, Checkpoint) else read(source)
    model = load(checkpoint, _DTYPES[precision])
    progress("trace", 0, 0)
    traced = trace(model, chosen)
    progress("fuse", 0, 0)
    graphs = build_graphs(traced, chosen)
    with PackageWriter(out) as writer:
        files = {f"{name}.onnx": graph.model for name, graph in graphs.items()}
        write_graphs(
            files,
            writer.path,
            WeightsSpec().file,
            lambda done, total: progress("write weights", done, total),
        )
        _write_side_files(writer.path, checkpoint)
        states = _states(graphs[io_spec.DECODE].model.graph, chosen.state_update, model)
        return writer.finish(_manifest(checkpoint, graphs, states, precision, lowering))


def _write_side_files(folder: Path, checkpoint: Checkpoint) -> None:
    def write_json(name: str, value: Mapping[str, object]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")

    write_json("config.json", checkpoint.raw_config)
    write_json("generation_config.json", checkpoint.generation_config)
    for name, content in checkpoint.tokenizer_files.items():
        (folder / name).write_bytes(content)


def _manifest(
    checkpoint: Checkpoint,
    graphs: Mapping[str, BuiltGraph],
    states: tuple[StateSpec, ...],
    precision: str,
    lowering_name: str,
) -> Manifest:
    config = checkpoint.config
    decode = graphs[io_spec.DECODE].model.graph
    return Manifest(
        producer=Producer("onnxlm", __version__, {name: version(name) for name in _LIBRARIES}),
        task="text-generation",
        architecture=config.model_type,
        precision=precision,
        lowering=lowering_name,
        graphs={
            name: describe(f"{name}.onnx", graph.model, graph.fusions)
            for name, graph in graphs.items()
        },
        states=states,
        weights=WeightsSpec(),
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        source={"path": str(checkpoint.path), "kind": checkpoint.kind, **checkpoint.provenance},
        parameters=_parameters(decode, checkpoint.tensors.keys()),
    )


def _states(graph: ir.Graph, update: str, model: DecoderLM) -> tuple[StateSpec, ...]:
    """Every cache of a graph, from its own inputs and outputs; windows are the model's."""
    windows = {
        io_spec.past_name(layer, part): window
        for layer, window in enumerate(model.windows)
        for part in model.state_shapes[layer]
    }
    presents = {value.name for value in graph.outputs}
    states = []
    for value in graph.inputs:
        name = value.name or ""
        if not name.startswith(io_spec.PAST_PREFIX):
            continue
        present = io_spec.present_of(name)
        if present not in presents or value.shape is None or value.dtype is None:
            raise ValueError(f"{name} has no {present}, shape or type")
        shape = tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape)
        twin = io_spec.twin_of(present)
        states.append(
            StateSpec(
                name,
                present,
                value.dtype.numpy().name,
                shape,
                update,
                twin=twin if twin in presents else "",
                window=windows[name],
            )
        )
    return tuple(states)


def _parameters(graph: ir.Graph, names: Set[str]) -> dict[str, ParameterSpec]:
    """Where each parameter of the eager model lies, by its name."""
    transposed = {linear.name for linear in linears(graph) if linear.transposed}
    places: dict[str, ParameterSpec] = {}
    for name, value in graph.initializers.items():
        parts = value.metadata_props.get(PARTS)
        if parts is not None:
            for parameter, start, end in json.loads(parts):
                places[parameter] = ParameterSpec(name, (start, end))
        elif name in names:
            places[name] = ParameterSpec(name, transposed=name in transposed)
    return places
