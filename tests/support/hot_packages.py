"""Packages of hot models with a tokenizer that spells one character a token, and wrong copies of packages."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel

from onnxlm.export import export
from onnxlm.graphs.weights_file import write_graphs
from onnxlm.models import load
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.registry import find_architecture
from onnxlm.package import Package, PackageWriter
from support.hot import hot_model, save_folder

# Every printable ASCII character and the line feed: as many as the tiny models have tokens.
LETTERS = "\n" + "".join(map(chr, range(32, 127)))
# Two layers are enough, and every parameter counts.
CONFIG = dict(find_architecture("llama").tiny) | {"attention_bias": True, "mlp_bias": True}

_ROOT = tempfile.TemporaryDirectory(prefix="onnxlm-hot-packages-")


def new_folder() -> Path:
    """A folder that lives as long as the test session."""
    return Path(tempfile.mkdtemp(dir=_ROOT.name))


def letter_tokenizer() -> Tokenizer:
    """One token a character, ids in the order of `LETTERS`."""
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@functools.cache
def oracle() -> PreTrainedModel:
    """The transformers model."""
    return hot_model(CONFIG)


@functools.cache
def checkpoint() -> Path:
    """It as a Hugging Face folder, with the tokenizer."""
    folder = save_folder(oracle(), new_folder())
    letter_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def eager() -> DecoderLM:
    """The project's model of the same weights."""
    return load(checkpoint())


@functools.cache
def package(lowering: str = "ort", precision: str = "fp32") -> Package:
    """Its package."""
    return export(checkpoint(), new_folder() / "model", precision=precision, lowering=lowering)


Graphs = dict[str, ir.Model]


def edited(source: Package, edit: Callable[[Package, Graphs], None]) -> Package:
    """A whole and valid package whose graphs or weights are wrong: what a faulty exporter would write."""
    graphs = {name: ir.load(source.graph_path(name)) for name in source.manifest.graphs}
    edit(source, graphs)
    with PackageWriter(new_folder() / "wrong") as writer:
        files = {source.manifest.graphs[name].file: model for name, model in graphs.items()}
        data_name = source.manifest.weights.file
        write_graphs(files, writer.path, data_name)
        for name in source.manifest.files.keys() - files.keys() - {data_name}:
            shutil.copy(source.path / name, writer.path / name)
        return writer.finish(source.manifest)


def change_parameter(
    source: Package,
    graphs: Graphs,
    name: str,
    change: Callable[[NDArray[Any]], NDArray[Any]],
) -> None:
    """Put something else in the place of a parameter of the eager model, in torch's layout."""
    place = source.manifest.parameters[name]

    def whole(stored: NDArray[Any]) -> NDArray[Any]:
        stored = stored.copy()
        view = stored.T if place.transposed else stored
        rows = slice(None) if place.rows is None else slice(*place.rows)
        view[rows] = change(view[rows].copy())
        return stored

    change_tensor(graphs, place.tensor, whole)


def change_tensor(
    graphs: Graphs, name: str, change: Callable[[NDArray[Any]], NDArray[Any]]
) -> None:
    """Put something else in place of an initializer, or of those that passes made of it, in every graph."""
    values = [value for graph in graphs.values() for value in graph.graph.initializers.values()]
    held = [value for value in values if f"{value.name}.".startswith(f"{name}.")]
    assert held
    for value in held:
        tensor = value.const_value
        assert tensor is not None
        changed = np.ascontiguousarray(change(tensor.numpy().copy()))
        value.const_value = ir.tensor(changed, name=value.name)
