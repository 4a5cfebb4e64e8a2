"""Eight bits in blocks of 32, activation outliers smoothed into the weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxlm.quantize.blocks import round_to_nearest
from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.schemes import Scheme
from onnxlm.quantized_tensor import QuantizedTensor

_BLOCK = 32


def _nearest(weight: NDArray[np.float32], statistics: Statistics | None) -> QuantizedTensor:
    return round_to_nearest(weight, 8, _BLOCK, short_scales=True)


SCHEME = Scheme(
    precision="int8",
    quantize_weight=_nearest,
    quantize_head=_nearest,
    smoothing=0.6,
    expert_bits=8,
    expert_block=_BLOCK,
    summary={"bits": 8, "block_size": _BLOCK, "head_bits": 8},
)
