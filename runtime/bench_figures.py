"""Samples -> figures: medians, spreads, percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxlm.runtime.bench import Sample


@dataclass(frozen=True)
class Spread:
    """The middle and the ends of some figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(float(np.median(values)), float(min(values)), float(max(values)))


@dataclass(frozen=True)
class Speed:
    """Figures of one contestant at one prompt length over its rounds.

    Attributes:
        ttft_ms: From the prompt's ids to the first new token.
        prefill_tokens_per_s: Prompt tokens by that time.
        decode_tokens_per_s: One by the median step of a round.
        decode_p95_ms: Time that 95 of 100 steps of all rounds do not exceed.
    """

    ttft_ms: Spread
    prefill_tokens_per_s: Spread
    decode_tokens_per_s: Spread | None
    decode_p95_ms: float | None


def speed(samples: Sequence[Sample], prompt_tokens: int) -> Speed:
    """Figures of at least one round; those of decoding are None when no steps were run."""
    steps = [step for sample in samples for step in sample.step_s]
    rates = [1 / float(np.median(sample.step_s)) for sample in samples if sample.step_s]
    return Speed(
        ttft_ms=Spread.of([1000 * sample.prefill_s for sample in samples]),
        prefill_tokens_per_s=Spread.of([prompt_tokens / sample.prefill_s for sample in samples]),
        decode_tokens_per_s=Spread.of(rates) if rates else None,
        decode_p95_ms=1000 * float(np.quantile(steps, 0.95)) if steps else None,
    )
