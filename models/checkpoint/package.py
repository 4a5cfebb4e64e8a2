"""Full-precision package -> Checkpoint: a package can be loaded, exported again and compared with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from onnxlm import io_spec
from onnxlm.errors import CheckpointError
from onnxlm.manifest import ParameterSpec
from onnxlm.models.checkpoint.checkpoint import Checkpoint
from onnxlm.models.checkpoint.huggingface import describe_folder
from onnxlm.models.checkpoint.matching import listed, parameters_of
from onnxlm.models.checkpoint.tensors import StoredTensor
from onnxlm.package import open_package


def read_package(folder: Path) -> Checkpoint:
    """Read everything of a package but the weights' values.

    Raises:
        PackageError: The package is damaged.
        CheckpointError: Its weights are quantized, or do not fit its config.
    """
    package = open_package(folder)
    manifest = package.manifest
    if manifest.quantization is not None:
        raise CheckpointError(
            f"{folder}: its weights are quantized",
            found=manifest.precision,
            allowed="a package in fp32 or fp16",
            fix="name what it was made from",
        )
    described = describe_folder(folder, "package")
    graph = ir.load(package.graph_path(io_spec.DECODE)).graph
    stored = {
        name: _stored(name, graph, place, manifest.weights.file)
        for name, place in manifest.parameters.items()
        if place.tensor in graph.initializers
    }
    shapes, _ = parameters_of(described.architecture, described.config)
    found = {name: tensor.shape for name, tensor in stored.items()}
    if found != shapes:
        different = {n for n in shapes.keys() | found.keys() if shapes.get(n) != found.get(n)}
        raise CheckpointError(
            f"{folder}: parameters do not fit config.json", found=listed(different)
        )
    return dataclasses.replace(described, provenance=dict(manifest.source), tensors=stored)


def _stored(name: str, graph: ir.Graph, place: ParameterSpec, file: str) -> StoredTensor:
    tensor = graph.initializers[place.tensor].const_value
    if tensor is None:
        raise CheckpointError(f"{file}: {place.tensor} has no value")
    whole = tuple(
        dim for dim in tensor.shape if isinstance(dim, int)
    )  # a stored tensor has no other
    shape = whole[::-1] if place.transposed else whole
    start, end = place.rows if place.rows is not None else (0, shape[0])

    def read() -> Tensor:
        values = tensor.numpy()
        oriented = values.T if place.transposed else values
        # A copy: the file is memory-mapped, and a parameter may be trained.
        return torch.from_numpy(np.array(oriented[start:end]))

    nbytes = tensor.nbytes * (end - start) // shape[0]
    return StoredTensor(name, file, (end - start, *shape[1:]), nbytes, read)
