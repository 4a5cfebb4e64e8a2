"""Whether this CPU's integer matrix products of unsigned by signed bytes saturate, found by asking it.

x86 without VNNI adds pairs of such products in 16 bits. ONNX Runtime has an exact, slower path for that,
which it also takes, needlessly, on CPUs that are exact: so it is switched on only where it is needed.
"""

from __future__ import annotations

import base64
from functools import cache

import numpy as np
import onnxruntime as ort

# MatMulInteger(x uint8 [1, 4], w int8 [4, 1] all 127) as a serialized model; tests build it with onnx.
PROBE = base64.b64decode(
    "CAg6YQoYCgF4CgF3EgF5Ig1NYXRNdWxJbnRlZ2VyEgpzYXR1cmF0aW9uKg8IBAgBEANCAXdKBH9/f39aEwoBeBIOCgwI"
    "AhIICgIIAQoCCARiEwoBeRIOCgwIBhIICgIIAQoCCAFCBAoAEAo="
)


@cache
def products_saturate() -> bool:
    """Run four products of 255 by 127, whose exact sum is 129,540."""
    session = ort.InferenceSession(PROBE, providers=["CPUExecutionProvider"])
    (total,) = session.run(None, {"x": np.full((1, 4), 255, dtype=np.uint8)})
    return int(total[0, 0]) != 4 * 255 * 127
