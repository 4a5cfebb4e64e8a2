"""How far a stage may differ from its oracle, in one table, with the reason for each number.

A bound is relative to the largest value where that is above 1: `bound * max(1, max|oracle|)`. What it has to
catch is far above it: on the models of `support.hot` a dropped feature moves logits by 0.1 and more.
"""

from __future__ import annotations

from onnxlm.tolerances import PARITY, Tolerance

# (stage, element type) -> tolerance. Packages are held to the bounds that `onnxlm verify` holds them to.
TOLERANCES = {
    ("eager", "float32"): PARITY["fp32"],
    ("graph", "float32"): PARITY["fp32"],
    ("graph", "float16"): PARITY["fp16"],
    ("activations", "int8"): Tolerance(
        0.2, "activations of 8 bits (0.4% of a block's range) at every layer, grown by hot ones"
    ),
    ("experts", "int8"): Tolerance(
        0.04, "inputs of experts of 8 bits and nothing else, on the same routes: 0.024 was the most"
    ),
    ("pass", "float32"): Tolerance(
        1e-5, "one operator against the few that it replaces: a handful of roundings (1.2e-7)"
    ),
}


def tolerance(stage: str, dtype: str) -> float:
    """The bound of one stage in one element type."""
    return TOLERANCES[stage, dtype].bound
