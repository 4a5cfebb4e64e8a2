"""Packages to quantize, and a reader of quantized ones that shares no code with the project's writer."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from onnxlm import io_spec
from onnxlm.export import export
from onnxlm.models import load
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.registry import architecture_names, find_architecture
from onnxlm.package import Package
from onnxlm.quantize.blocks import round_to_nearest
from onnxlm.quantize.rewrite import LOWERINGS
from onnxlm.quantized_tensor import QuantizedTensor
from support.exported import CASES as TRACED
from support.exported import traced, variants
from support.hot import hot_model, save_folder
from support.hot_packages import letter_tokenizer
from support.matrix import REPRESENTATIVES, cases

Array = NDArray[Any]
# Characters of the letter tokenizer: enough windows to calibrate a tiny model, and none that it cannot spell.
TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times; then it rests.\n" * 8
_WHOLE = re.compile(r"^embed_positions\.|\.(router|shared_expert_gate|[kv]_up|[qk]_norm)\.|_bias$")
Form = tuple[int, int, bool]  # bits, block size, symmetric
_ROOT = tempfile.TemporaryDirectory(prefix="onnxlm-quantized-")


def new_folder() -> Path:
    """A folder that lives as long as the test session."""
    return Path(tempfile.mkdtemp(dir=_ROOT.name))


def configs(family: str) -> dict[str, dict[str, Any]]:
    """Configs of one family: those of the graph tests; of one, too, widths that no block divides.

    Of one, as blocks do not know families, and in most a head's width must divide the hidden size.
    """
    found = variants(family)
    if family != "llama":
        return found
    tiny = dict(find_architecture(family).tiny)
    odd = {"hidden_size": 100, "intermediate_size": 150}
    return {
        **found,
        "odd widths": tiny | odd,
        "odd widths, untied, biases": tiny
        | odd
        | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    }


def quantized_packages() -> list[Any]:
    """(family, variant, lowering) of what is quantized; by default each family once, a few in every form."""
    rows = [
        (family, name, lowering)
        for family in architecture_names()
        for name in configs(family)
        for lowering in LOWERINGS
    ]
    return cases(rows, _is_default)


def _is_default(family: str, variant: str, lowering: str) -> bool:
    if family == "llama":
        return True
    return variant == "tiny" and (lowering == "ort" or family in REPRESENTATIVES)


@functools.cache
def oracle(family: str, variant: str) -> PreTrainedModel:
    """The transformers model."""
    return hot_model(configs(family)[variant])


@functools.cache
def checkpoint(family: str, variant: str) -> Path:
    """It on disk, with a tokenizer of one token a character."""
    folder = save_folder(oracle(family, variant), new_folder())
    letter_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def eager(family: str, variant: str) -> DecoderLM:
    """The project's model of the same weights; do not change it."""
    return load(checkpoint(family, variant))


@functools.cache
def half_source(family: str, lowering: str = "ort") -> Package:
    """The fp16 package of the tiny model."""
    out = new_folder() / "fp16"
    return export(checkpoint(family, "tiny"), out, precision="fp16", lowering=lowering)


@functools.cache
def source(family: str, variant: str, lowering: str = "ort") -> Package:
    """Its fp32 package; where the graph tests have the model too, of the program that they have traced."""
    folder, out = checkpoint(family, variant), new_folder() / "fp32"
    if (family, variant) not in TRACED:
        return export(folder, out, lowering=lowering)
    program = traced(family, variant, lowering)
    with mock.patch("onnxlm.export.exporting.trace", return_value=program):
        return export(folder, out, lowering=lowering)


def initializers(package: Package) -> dict[str, Array]:
    """Every stored tensor of all graphs by name; graphs must agree."""
    found: dict[str, Array] = {}
    for graph in package.manifest.graphs.values():
        for name, value in ir.load(package.path / graph.file).graph.initializers.items():
            assert value.const_value is not None
            array = value.const_value.numpy()
            assert name not in found or np.array_equal(found[name], array)
            found[name] = array
    return found


def stored_matrix(graph: ir.Graph, name: str) -> NDArray[np.float32] | None:
    """The matrix [N, K or more] that stored codes mean by their formats; None if there are none."""
    held = {n: v.const_value.numpy() for n, v in graph.initializers.items() if v.const_value}
    bits = next((bits for bits in (4, 8) if f"{name}.q{bits}" in held), None)
    if bits is None:
        return None
    data, scale = held[f"{name}.q{bits}"], held[f"{name}.scale"].astype(np.float32)
    value = graph.initializers[f"{name}.q{bits}"]
    if data.dtype == np.uint8:
        data = np.stack([data & 15, data >> 4], axis=-1) if bits == 4 else data
        codes = data.reshape(len(scale), -1).astype(np.float32)
    else:  # signed; [K, N] where no embedding reads rows
        is_table = any(node.op_type == "Gather" for node, _ in value.uses())
        codes = (data if is_table else data.T).astype(np.float32) + 2 ** (bits - 1)
    size = _block_size(value)
    codes = np.pad(codes, ((0, 0), (0, scale.shape[1] * size - codes.shape[1])))
    values = scale[..., None] * codes.reshape(*scale.shape, size)
    if f"{name}.minimum" in held:  # as GGUF says it: w = d * q + m
        values += held[f"{name}.minimum"].astype(np.float32)[..., None]
    else:
        values -= scale[..., None] * np.float32(2 ** (bits - 1))
        if f"{name}.offset" in held:
            values += held[f"{name}.offset"].astype(np.float32)[..., None]
    return values.reshape(len(scale), -1)


def _block_size(codes: ir.Value) -> int:
    """Of the operator that reads them."""
    for node, _ in codes.uses():
        if "block_size" in node.attributes:
            return node.attributes["block_size"].as_int()
    return _block_size(next(node for node, _ in codes.uses()).outputs[0])


def stored_parameters(package: Package, model: DecoderLM) -> dict[str, Tensor]:
    """Parameters of the eager model as a quantized package holds them."""
    graph = ir.load(package.graph_path(io_spec.DECODE)).graph
    vectors = initializers(package)
    found = {}
    for name, parameter in model.named_parameters():
        place = package.manifest.parameters[name]
        rows = slice(None) if place.rows is None else slice(*place.rows)
        if stays_whole(name, parameter):
            whole = vectors[place.tensor]
            part = (whole.T if place.transposed else whole)[rows]
        elif parameter.dim() == 3:
            codes = stored_experts(graph, place.tensor)
            part = vectors[place.tensor] if codes is None else codes  # whole in standard operators
        else:
            matrix = stored_matrix(graph, place.tensor)
            assert matrix is not None, f"{name} is stored in full precision"
            part = matrix[rows, : parameter.shape[1]]
        found[name] = torch.from_numpy(np.array(part, dtype=np.float32))
    # A norm without weights of its own has ones in a graph, which smoothing changes.
    ones = {name for name, _ in model.named_buffers() if name.endswith("norm.weight")}
    found |= {name: torch.from_numpy(vectors[name].copy()) for name in ones & vectors.keys()}
    return found


def stays_whole(name: str, parameter: Tensor) -> bool:
    """Whether a parameter keeps its precision: vectors, tables of positions, norms of heads, what chooses
    experts, and maps of single heads that latent attention absorbs."""
    return parameter.dim() == 1 or _WHOLE.search(name) is not None


def stored_experts(graph: ir.Graph, name: str) -> NDArray[np.float32] | None:
    """The matrices [E, N, K] that the codes of QMoE mean: uint8, low bits first, scales [E, N, blocks]."""
    held = {n: v.const_value.numpy() for n, v in graph.initializers.items() if v.const_value}
    bits = next((bits for bits in (4, 8) if f"{name}.q{bits}" in held), None)
    if bits is None:
        return None
    data, scale = held[f"{name}.q{bits}"], held[f"{name}.scale"]
    if bits == 4:
        data = np.stack([data & 15, data >> 4], axis=-1)
    codes = data.reshape(*scale.shape, -1).astype(np.float32) - 2 ** (bits - 1)
    values: NDArray[np.float32] = (scale[..., None] * codes).reshape(*scale.shape[:2], -1)
    return values


def codes_of(model: nn.Module, form: Callable[[str], Form]) -> dict[str, QuantizedTensor]:
    """Codes for every matrix of a model, by parameter."""
    given = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not stays_whole(name, parameter):
            bits, size, symmetric = form(name)
            values = parameter.detach().numpy()
            given[name] = round_to_nearest(values, bits, size, symmetric=symmetric)
    return given


def with_parameters(model: DecoderLM, values: Mapping[str, Tensor | QuantizedTensor]) -> DecoderLM:
    """A copy of the eager model with other parameters and buffers."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in (*changed.named_parameters(), *changed.named_buffers()):
            if name in values:
                value = values[name]
                if isinstance(value, QuantizedTensor):
                    value = torch.from_numpy(value.dequantize())
                parameter.copy_(value)
    return changed


@torch.no_grad()
def eager_logits(model: DecoderLM, ids: Sequence[int]) -> Tensor:
    """Logits [S, V] of one row, run at once."""
    logits, _ = model(torch.tensor([list(ids)]))
    return logits[0].float()
