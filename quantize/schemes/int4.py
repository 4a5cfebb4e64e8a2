"""Four bits in blocks of 32, head and embedding at eight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxlm.quantize.blocks import round_to_nearest
from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.schemes import Scheme
from onnxlm.quantized_tensor import QuantizedTensor

_BLOCK = 32


def _weight(weight: NDArray[np.float32], statistics: Statistics | None) -> QuantizedTensor:
    return round_to_nearest(weight, 4, _BLOCK)


def _head(weight: NDArray[np.float32], statistics: Statistics | None) -> QuantizedTensor:
    return round_to_nearest(weight, 8, _BLOCK)


SCHEME = Scheme(
    precision="int4",
    quantize_weight=_weight,
    quantize_head=_head,
    summary={"bits": 4, "block_size": _BLOCK, "head_bits": 8},
)
