"""The project's tolerance for logits of fp32 models."""

from __future__ import annotations

import torch
from torch import Tensor

# Sums of a few hundred fp32 products in another order; a dropped feature moves hot logits by 0.1 and more.
FP32_LOGITS = 1e-4


def assert_logits_close(ours: Tensor, theirs: Tensor, tolerance: float = FP32_LOGITS) -> None:
    """Largest difference at any position, relative to the largest logit where that is above 1."""
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    assert torch.isfinite(theirs).all()
    difference = (ours - theirs).abs().max().item()
    allowed = tolerance * max(1.0, theirs.abs().max().item())
    assert difference <= allowed, f"logits differ by {difference:.3g}, allowed {allowed:.3g}"
