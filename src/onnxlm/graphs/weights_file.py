"""Several graphs over one external data file: each tensor once, in pages that can be memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir

# Tensors below this stay inside the .onnx, where constant folding and shape inference can see them.
_INLINE_BYTES = 1024
_ALIGNMENT = 64
_PAGE = 4096
_PAGE_ALIGNED_FROM = 1 << 20


def write_graphs(
    graphs: Mapping[str, ir.Model],
    folder: Path,
    data_name: str,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write `folder/<key>` for every graph and their weights, once each by name, to `folder/data_name`.

    The graphs' initializers refer to the written file afterwards, so the originals can be freed. The data
    file appears whole or not at all, so a graph may read its weights from the file that is replaced.

    Args:
        graphs: File name -> model.
        folder: An existing folder.
        data_name: Name of the data file.
        progress: Called with (bytes done, bytes in all).

    Returns:
        Size of the data file in bytes.

    Raises:
        ValueError: An initializer has no value, or two graphs mean different tensors by one name.
    """
    tensors = _distinct_tensors(graphs)
    partial = folder / f".{data_name}.partial"
    try:
        with open(partial, "wb") as file:
            written = _write_tensors(tensors, file, folder / data_name, progress)
            size = file.tell()
        os.replace(partial, folder / data_name)
    finally:
        partial.unlink(missing_ok=True)
    for file_name, model in graphs.items():
        for name, value in model.graph.initializers.items():
            if name in written:
                value.const_value = written[name]
        ir.save(model, folder / file_name)
    return size


def _write_tensors(
    tensors: Mapping[str, ir.TensorProtocol],
    file: BinaryIO,
    path: Path,
    progress: Callable[[int, int], None] | None,
) -> dict[str, ir.ExternalTensor]:
    """Write tensors one behind the other; returns where each will be found in `path`."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    written: dict[str, ir.ExternalTensor] = {}
    for name, tensor in tensors.items():
        step = _PAGE if tensor.nbytes >= _PAGE_ALIGNED_FROM else _ALIGNMENT
        file.write(b"\0" * (-file.tell() % step))
        offset = file.tell()
        tensor.tofile(file)  # type: ignore[attr-defined]  # of every class, not of the protocol
        written[name] = ir.ExternalTensor(
            path.name,
            offset,
            file.tell() - offset,
            tensor.dtype,
            shape=tensor.shape,  # type: ignore[arg-type]
            name=name,
            base_dir=path.parent,
        )
        if progress is not None:
            progress(file.tell(), total)
    return written


def _distinct_tensors(graphs: Mapping[str, ir.Model]) -> dict[str, ir.TensorProtocol]:
    tensors: dict[str, ir.TensorProtocol] = {}
    for file_name, model in graphs.items():
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is None:
                raise ValueError(f"{file_name}: initializer {name} has no value")
            if tensor.nbytes < _INLINE_BYTES:
                continue
            known = tensors.setdefault(name, tensor)
            if known is not tensor and not _equal(known, tensor):
                raise ValueError(f"{file_name}: {name} is another tensor in another graph")
    return tensors


def _equal(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    places = [
        (tensor.path, tensor.offset, tensor.length)
        for tensor in (a, b)
        if isinstance(tensor, ir.ExternalTensor)
    ]
    same_place = len(places) == 2 and places[0] == places[1]
    return same_place or a.tobytes() == b.tobytes()
