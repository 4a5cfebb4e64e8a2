"""Comparison of logits by the project's tolerances."""

from __future__ import annotations

import torch
from parity.tolerances import tolerance
from torch import Tensor

FP32_LOGITS = tolerance("eager", "float32")


def assert_logits_close(ours: Tensor, theirs: Tensor, bound: float = FP32_LOGITS) -> None:
    """Largest difference at any position, relative to the largest logit where that is above 1."""
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    assert torch.isfinite(theirs).all()
    difference = (ours - theirs).abs().max().item()
    allowed = bound * max(1.0, theirs.abs().max().item())
    assert difference <= allowed, f"logits differ by {difference:.3g}, allowed {allowed:.3g}"
