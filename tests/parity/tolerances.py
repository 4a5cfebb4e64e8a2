"""How far a stage may differ from its oracle, in one table, with the reason for each number.

A bound is relative to the largest value where that is above 1: `bound * max(1, max|oracle|)`. What it has to
catch is far above it: on the models of `support.hot` a dropped feature moves logits by 0.1 and more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """A bound on the largest absolute difference, and where it comes from."""

    bound: float
    reason: str


# (stage, element type) -> tolerance.
TOLERANCES = {
    ("eager", "float32"): Tolerance(
        1e-4, "sums of a few hundred fp32 products in another order, through every layer"
    ),
    ("graph", "float32"): Tolerance(
        1e-4, "as eager; ONNX Runtime's fused kernels order their sums in their own way"
    ),
    ("graph", "float16"): Tolerance(
        1e-2, "11 bits of mantissa (5e-4) in weights and activations, grown by hot layers"
    ),
    ("pass", "float32"): Tolerance(
        1e-5, "one operator against the few that it replaces: a handful of roundings (1.2e-7)"
    ),
}


def tolerance(stage: str, dtype: str) -> float:
    """The bound of one stage in one element type."""
    return TOLERANCES[stage, dtype].bound
