"""Quantization schemes by file name: each file exposes one `SCHEME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxlm.errors import QuantizationError
from onnxlm.plugins import Registry
from onnxlm.quantize.calibration import Statistics
from onnxlm.quantized_tensor import QuantizedTensor

# (weight [N, K], what was seen of its input; None when nothing was observed) -> codes.
QuantizeWeight = Callable[[NDArray[np.float32], Statistics | None], QuantizedTensor]


@dataclass(frozen=True)
class Scheme:
    """How the weights of a package become codes.

    Attributes:
        precision: What the manifest calls the result ("int8", "int4").
        quantize_weight: For linear layers.
        quantize_head: For the LM head and the embedding table, which share one tensor when tied.
        smoothing: Strength with which activation outliers move into weights; None for not at all.
        hessian: Whether `quantize_weight` wants second moments of the inputs, not only their ranges.
        expert_bits: Width of the codes of a mixture's experts, which are rounded to the nearest.
        expert_block: Most columns of an expert that share a scale.
        summary: What a reader of the manifest should know (bits, block sizes, ...).
    """

    precision: str
    quantize_weight: QuantizeWeight
    quantize_head: QuantizeWeight
    smoothing: float | None = None
    hessian: bool = False
    expert_bits: int = 8
    expert_block: int = 32
    summary: Mapping[str, Any] = field(default_factory=dict)


_SCHEMES = Registry(__name__, "SCHEME", Scheme, "scheme is not known", QuantizationError)


def scheme_names() -> list[str]:
    """Available schemes."""
    return _SCHEMES.names()


def find_scheme(name: str) -> Scheme:
    """The scheme in file `name`.

    Raises:
        QuantizationError: There is none.
    """
    return _SCHEMES.find(name)
