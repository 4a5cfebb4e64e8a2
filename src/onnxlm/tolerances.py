"""How far a package's numbers may be from the full-precision model's, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """A bound on the largest absolute difference: `bound * max(1, max|reference|)`.

    Attributes:
        bound: The factor.
        reason: Where it comes from.
    """

    bound: float
    reason: str

    def allowed(self, largest: float) -> float:
        """The largest difference that passes beside a reference whose largest magnitude is `largest`."""
        return self.bound * max(1.0, largest)


# By the precision of a package. Quantized packages have no such bound: they are judged by their quality.
PARITY = {
    "fp32": Tolerance(1e-4, "the same fp32 products, summed in another order through every layer"),
    # Looser than many a fault is small: fp16 packages are judged by their quality as well.
    "fp16": Tolerance(
        2e-2, "weights and activations rounded to 11 bits (5e-4); 30 layers make 6e-3 of it"
    ),
}
