"""A GGUF file as named metadata and tensors that are not read yet.

Format: ggml, `docs/gguf.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor, quants
from gguf.constants import GGUF_MAGIC, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.gguf_blocks import EXACT_TYPES, unpack
from onnxlm.models.checkpoint.tensors import StoredTensor
from onnxlm.quantized_tensor import QuantizedTensor

VERSIONS = (2, 3)
_HEADER_BYTES = 24  # magic, version, tensor count, metadata count
_REFETCH = "fetch the file again"


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file, or several that hold one model.

    Attributes:
        path: The file, the first of several.
        metadata: Every key; strings, numbers, lists.
        tensors: Descriptions and memory-mapped bytes by tensor name.
        elsewhere: The file of each tensor that the first does not hold.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]
    elsewhere: Mapping[str, Path] = field(default_factory=dict)

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return sorted({self.path, *self.elsewhere.values()})

    def holder(self, tensor: str) -> Path:
        """The file that holds a tensor."""
        return self.elsewhere.get(tensor, self.path)


class _StrictReader(GGUFReader):
    """Refuses to read past the end, where the library goes on with fewer items.

    A damaged length of an array would otherwise be counted to its end, whatever the file holds.
    """

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> NDArray[Any]:
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"bytes {offset} to {end} lie behind the end")
        items: NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return items


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and read its metadata.

    Raises:
        CheckpointError: The file is no GGUF, of an unknown version or byte order, cut short, or holds a
            tensor type that cannot be read.
    """
    _check_header(path)
    try:
        reader = _StrictReader(path)
        metadata = {field.name: field_value(field) for field in reader.fields.values()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: the GGUF file is damaged or cut short",
            found=f"{path.stat().st_size} bytes ({type(error).__name__}: {error})",
            fix=_REFETCH,
        ) from error
    file = GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    _check_types(file)
    return file


def field_value(field: ReaderField) -> Any:
    """A metadata value as plain Python."""
    value = field.contents()
    if field.types == [GGUFValueType.FLOAT32]:
        # The shortest decimal that gives this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value)))
    return value


def _check_header(path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    expected = GGUF_MAGIC.to_bytes(4, "little")
    if header[:4] != expected:
        pointer = header.startswith(b"version https://")
        raise CheckpointError(
            f"{path}: not a GGUF file",
            found="a Git-LFS pointer" if pointer else f"magic {header[:4]!r}",
            allowed=repr(expected),
            fix="run `git lfs pull`" if pointer else _REFETCH,
        )
    if len(header) < _HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the GGUF file is cut short",
            found=f"{len(header)} bytes",
            allowed=f"at least {_HEADER_BYTES}",
            fix=_REFETCH,
        )
    version = int.from_bytes(header[4:8], "little")
    if version not in VERSIONS:
        swapped = int.from_bytes(header[4:8], "big") in VERSIONS
        raise CheckpointError(
            f"{path}: GGUF version is not supported",
            found="a big-endian file" if swapped else version,
            allowed=f"little-endian versions {', '.join(map(str, VERSIONS))}",
        )
    if sys.byteorder != "little":
        raise CheckpointError(f"{path}: GGUF files are read on little-endian machines only")


def _check_types(file: GgufFile) -> None:
    for tensor in file.tensors.values():
        kind = tensor.tensor_type
        if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16) and (
            kind not in quants._type_traits
        ):
            readable = ["F32", "F16", *(known.name for known in quants._type_traits)]
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name} has a type that cannot be read",
                found=kind.name,
                allowed=", ".join(readable),
            )


def stored_tensor(
    file: GgufFile, tensor: ReaderTensor, part: NDArray[np.intp] | int | None = None
) -> StoredTensor:
    """A reader of one tensor.

    Args:
        file: The file.
        tensor: Its description.
        part: Order in which its rows are wanted, or which one of its matrices (or biases, where it has one a
            row); None for all as they lie.
    """

    def data() -> NDArray[Any]:
        return tensor.data if part is None else tensor.data[part]

    kind = tensor.tensor_type
    shape = tuple(int(size) for size in reversed(tensor.shape))
    nbytes = int(tensor.n_bytes)
    if isinstance(part, int):
        shape, nbytes = shape[1:], nbytes // shape[0]

    def exact() -> QuantizedTensor:
        return unpack(data(), kind.name)

    def read() -> Tensor:
        if quantized is not None:
            return torch.from_numpy(quantized().dequantize())
        # The copy detaches the values from the read-only map of the file.
        return torch.from_numpy(np.array(quants.dequantize(data(), kind)))

    quantized = exact if kind.name in EXACT_TYPES and len(shape) == 2 else None
    return StoredTensor(tensor.name, file.holder(tensor.name).name, shape, nbytes, read, quantized)


def rotary_row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Order that undoes llama.cpp's interleaving of rotary pairs within each head.

    llama.cpp stores rows (0, D/2, 1, D/2 + 1, ...) of a head (`convert_hf_to_gguf.py`, `permute`);
    the half-split pairing wants (0, 1, ..., D/2, ...).

    Args:
        rows: Rows of the matrix, heads * D.
        heads: Heads of this matrix: query heads for Q, key-value heads for K.
    """
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)
