"""Codes that a checkpoint holds already, in the order in which a graph has merged their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxlm.errors import QuantizationError
from onnxlm.manifest import ParameterSpec
from onnxlm.quantized_tensor import QuantizedTensor


def merge_given(
    given: Mapping[str, QuantizedTensor], places: Mapping[str, ParameterSpec]
) -> dict[str, QuantizedTensor]:
    """Codes by graph initializer, from codes by parameter, where all of an initializer is given.

    Raises:
        QuantizationError: A name is no parameter.
    """
    unknown = sorted(given.keys() - places.keys())
    if unknown:
        raise QuantizationError(
            "given codes are for parameters that the package does not have",
            found=", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if unknown[3:] else ""),
        )
    parts: dict[str, list[tuple[int, str]]] = {}
    for parameter, place in places.items():
        start = place.rows[0] if place.rows is not None else 0
        parts.setdefault(place.tensor, []).append((start, parameter))
    merged: dict[str, QuantizedTensor] = {}
    for tensor, members in parts.items():
        ordered = [parameter for _, parameter in sorted(members)]
        if all(parameter in given for parameter in ordered):
            whole = concatenate([given[parameter] for parameter in ordered])
            if whole is not None:
                merged[tensor] = whole
    return merged


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Rows of several tensors under one another, exactly; None when their blocks do not fit together.

    Four-bit rows beside eight-bit ones become eight-bit codes of the same values, a wide block beside narrow
    ones several narrow ones of one scale: GGUF files give one matrix of a layer more bits than the others.
    """
    size = min(part.block_size for part in parts)
    if len({part.shape[1] for part in parts}) != 1 or any(part.block_size % size for part in parts):
        return None
    bits = max(part.bits for part in parts)
    offset: NDArray[np.float32] | None = None
    if any(part.offset is not None for part in parts):
        offset = np.concatenate(
            [
                _narrowed(np.zeros_like(p.scale) if p.offset is None else p.offset, p, size)
                for p in parts
            ]
        )
    return QuantizedTensor(
        bits,
        size,
        np.concatenate([_widened(part, bits) for part in parts]),
        np.concatenate([_narrowed(part.scale, part, size) for part in parts]),
        offset,
    )


def _widened(tensor: QuantizedTensor, bits: int) -> NDArray[np.uint8]:
    shift = (1 << (bits - 1)) - (1 << (tensor.bits - 1))
    return tensor.codes + np.uint8(shift)


def _narrowed(
    values: NDArray[np.float32], tensor: QuantizedTensor, size: int
) -> NDArray[np.float32]:
    """Values of the tensor's blocks, for blocks of `size` columns."""
    blocks = -(-tensor.shape[1] // size)
    return np.repeat(values, tensor.block_size // size, axis=1)[:, :blocks]
