"""Names of the arrays that are handed around."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
