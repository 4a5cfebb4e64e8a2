"""Codes that a checkpoint holds already, in the order in which a graph has merged their layers."""

from __future__ import annotations

from collections.abc import Mapping

from onnxlm.errors import QuantizationError
from onnxlm.manifest import ParameterSpec
from onnxlm.quantized_tensor import QuantizedTensor, concatenate


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


def fitting(name: str, tensor: QuantizedTensor, shape: tuple[int, ...]) -> QuantizedTensor:
    """The codes given for a weight.

    Raises:
        QuantizationError: They are of another shape.
    """
    if tensor.shape != shape:
        raise QuantizationError(
            f"shape of the codes given for {name}", found=tensor.shape, allowed=shape
        )
    return tensor
