"""Samples -> figures: medians, spreads, percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxlm.runtime.bench import Case, Sample
from onnxlm.strict_json import YOUNGER


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
    """Figures of one contestant on one case over its rounds; all rows of a batch together.

    Attributes:
        ttft_ms: From the prompts' ids to the first new tokens.
        prefill_tokens_per_s: Prompt tokens by that time.
        decode_tokens_per_s: Rows by the median step of a round.
        decode_p50_ms: Time that half of the steps of all rounds do not exceed.
        decode_p95_ms: The same of 95 in 100.
        decode_p99_ms: The same of 99 in 100.
        energy_j_per_token: Of the whole machine, by prompt and new tokens; None where it cannot be read.
    """

    ttft_ms: Spread
    prefill_tokens_per_s: Spread
    decode_tokens_per_s: Spread | None
    decode_p50_ms: float | None
    decode_p95_ms: float | None
    decode_p99_ms: float | None
    energy_j_per_token: Spread | None = None


@dataclass(frozen=True)
class Round:
    """Figures of one round: what runs are compared by.

    Attributes:
        ttft_ms: From the prompts' ids to the first new tokens.
        prefill_tokens_per_s: Prompt tokens by that time.
        decode_tokens_per_s: Rows by the median step; None when no step was run.
    """

    ttft_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None


@dataclass(frozen=True)
class Point:
    """Decoding with so many tokens in the cache.

    Attributes:
        context_length: Cached tokens of each row at the first of the steps.
        decode_tokens_per_s: Rows by the median step of a round.
        decode_p50_ms: As in `Speed`.
        decode_p95_ms: As in `Speed`.
        decode_p99_ms: As in `Speed`.
        rounds: Rows by the median step, of each round: what runs are compared by.
    """

    context_length: int
    decode_tokens_per_s: Spread
    decode_p50_ms: float
    decode_p95_ms: float
    decode_p99_ms: float
    rounds: tuple[float, ...] = field(default=(), metadata={YOUNGER: True})


def round_figures(sample: Sample, prompt_tokens: int, batch: int = 1) -> Round:
    """Figures of one run."""
    return Round(
        ttft_ms=1000 * sample.prefill_s,
        prefill_tokens_per_s=prompt_tokens * batch / sample.prefill_s,
        decode_tokens_per_s=batch / float(np.median(sample.step_s)) if sample.step_s else None,
    )


def speed(samples: Sequence[Sample], prompt_tokens: int, batch: int = 1) -> Speed:
    """Figures of at least one round; those of decoding are None when no steps were run."""
    rounds = [round_figures(sample, prompt_tokens, batch) for sample in samples]
    rates = [r.decode_tokens_per_s for r in rounds if r.decode_tokens_per_s is not None]
    steps = [step for sample in samples for step in sample.step_s]
    energies = [
        sample.energy_j / (batch * (prompt_tokens + 1 + len(sample.step_s)))
        for sample in samples
        if sample.energy_j is not None
    ]
    p50, p95, p99 = _percentiles_ms(steps) if steps else (None, None, None)
    return Speed(
        ttft_ms=Spread.of([r.ttft_ms for r in rounds]),
        prefill_tokens_per_s=Spread.of([r.prefill_tokens_per_s for r in rounds]),
        decode_tokens_per_s=Spread.of(rates) if rates else None,
        decode_p50_ms=p50,
        decode_p95_ms=p95,
        decode_p99_ms=p99,
        energy_j_per_token=Spread.of(energies) if energies else None,
    )


def curve(samples: Sequence[Sample], case: Case) -> tuple[Point, ...]:
    """Decoding at each context length of a curve, over at least one round."""
    points = []
    for i, length in enumerate(case.context_lengths):
        here = slice(i * case.new_tokens, (i + 1) * case.new_tokens)
        parts = [sample.step_s[here] for sample in samples]
        rates = [case.batch / float(np.median(part)) for part in parts]
        steps = [step for part in parts for step in part]
        points.append(Point(length, Spread.of(rates), *_percentiles_ms(steps), tuple(rates)))
    return tuple(points)


def _percentiles_ms(steps: Sequence[float]) -> tuple[float, float, float]:
    p50, p95, p99 = (1000 * float(q) for q in np.quantile(steps, (0.5, 0.95, 0.99)))
    return p50, p95, p99
