"""Several graphs over one external data file: each tensor once, in pages that can be memory-mapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

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

    Two graphs that name one tensor must mean the same one. The graphs' initializers refer to the written
    file afterwards, so the originals can be freed.

    Args:
        graphs: File name -> model.
        folder: An existing folder.
        data_name: Name of the data file.
        progress: Called with (bytes done, bytes in all).

    Returns:
        Size of the data file in bytes.
    """
    tensors = _distinct_tensors(graphs)
    total = sum(tensor.nbytes for tensor in tensors.values())
    written: dict[str, ir.ExternalTensor] = {}
    with open(folder / data_name, "wb") as file:
        for name, tensor in tensors.items():
            step = _PAGE if tensor.nbytes >= _PAGE_ALIGNED_FROM else _ALIGNMENT
            file.write(b"\0" * (-file.tell() % step))
            offset = file.tell()
            tensor.tofile(file)
            written[name] = ir.ExternalTensor(
                data_name,
                offset,
                file.tell() - offset,
                tensor.dtype,
                shape=tensor.shape,  # type: ignore[arg-type]
                name=name,
                base_dir=folder,
            )
            if progress is not None:
                progress(file.tell(), total)
        size = file.tell()
    for file_name, model in graphs.items():
        for name, value in model.graph.initializers.items():
            if name in written:
                value.const_value = written[name]
        ir.save(model, folder / file_name)
    return size


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
            if known is not tensor and (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{file_name}: {name} is another tensor in another graph")
    return tensors
