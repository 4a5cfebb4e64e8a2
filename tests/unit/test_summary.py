"""What is said of a package that was just made."""

from __future__ import annotations

import pytest

from onnxlm.cli.summary import collapsed


@pytest.mark.parametrize(
    ("quality", "useless"),
    [
        ({}, False),
        ({"prefill_kl": 0.01, "prefill_top1": 0.98, "decode_kl": 0.01, "decode_top1": 0.98}, False),
        ({"prefill_kl": 0.01, "prefill_top1": 0.98, "decode_kl": 0.6, "decode_top1": 0.98}, True),
        ({"prefill_kl": 0.01, "prefill_top1": 0.4}, True),
        # What was NaN or infinite is not in a manifest: its neighbours are.
        ({"prefill_tokens": 255.0, "prefill_top1": 0.98}, True),
        ({"prefill_kl": 0.01, "prefill_top1": 0.98, "decode_tokens": 255.0}, True),
    ],
)
def test_collapsed(quality: dict[str, float], useless: bool) -> None:
    assert collapsed(quality) == useless
