"""From logits to token ids: every row by its own settings, seed and step, none by its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxlm.errors import InputError
from onnxlm.runtime.candidates import Candidates, Floats, draw
from onnxlm.runtime.randomness import fresh_seed, uniforms
from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.truncation import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    scale_temperature,
)


@dataclass(frozen=True)
class DrawSettings:
    """What rows are drawn by, one number a row in each array [rows].

    Attributes:
        top_k: int64; 1 for a greedy row, whose only candidate is then its arg-max.
        temperature: float64.
        top_p: float64.
        min_p: float64.
        typical_p: float64.
        seeds: uint64.
        greedy: Whether all rows are.
    """

    top_k: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    typical_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    greedy: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> DrawSettings:
        """Those of some rows; a row without a seed gets a fresh one."""
        seeds = [fresh_seed() if one.seed is None else one.seed for one in params]
        return cls(
            top_k=np.array([1 if one.greedy else one.top_k for one in params], dtype=np.int64),
            temperature=np.array([1.0 if one.greedy else one.temperature for one in params]),
            top_p=np.array([one.top_p for one in params]),
            min_p=np.array([one.min_p for one in params]),
            typical_p=np.array([one.typical_p for one in params]),
            seeds=np.array(seeds, dtype=np.uint64),
            greedy=all(one.greedy for one in params),
        )

    def rows(self, chosen: NDArray[np.int64]) -> DrawSettings:
        """Those of the rows at int64 [n]."""
        top_k = self.top_k[chosen]
        return DrawSettings(
            top_k=top_k,
            temperature=self.temperature[chosen],
            top_p=self.top_p[chosen],
            min_p=self.min_p[chosen],
            typical_p=self.typical_p[chosen],
            seeds=self.seeds[chosen],
            greedy=bool((top_k == 1).all()),
        )


def sample(logits: Floats, settings: DrawSettings, steps: ArrayLike) -> NDArray[np.int64]:
    """The next token of every row.

    Args:
        logits: float32 [rows, vocab_size], the largest of each row finite.
        settings: Of the same rows.
        steps: Tokens each row has drawn so far, [rows] or one number for all.

    Returns:
        int64 [rows]. A row's token depends on its own logits, settings and step alone.
    """
    if settings.greedy:
        return np.asarray(logits.argmax(axis=1), dtype=np.int64)
    return draw(narrowed(Candidates(logits), settings), uniforms(settings.seeds, steps))


Filter = Callable[[Candidates, ArrayLike], Candidates]


def narrowed(candidates: Candidates, settings: DrawSettings) -> Candidates:
    """What may be drawn, by all rules in order.

    No temperature changes which tokens are the k largest: the other rules have less to do when those are
    chosen first.
    """
    steps: tuple[tuple[Filter, ArrayLike], ...] = (
        (keep_top_k, settings.top_k),
        (scale_temperature, settings.temperature),
        (keep_top_p, settings.top_p),
        (keep_min_p, settings.min_p),
        (keep_typical, settings.typical_p),
    )
    for apply, values in steps:
        candidates = apply(candidates, values)
    return candidates


def check_logits(logits: Floats) -> None:
    """Refuse rows that no rule can choose from: NaN, +inf, or nothing but -inf.

    Raises:
        InputError: A row, which is named, has NaN or no finite largest logit.
    """
    peaks = logits.max(axis=1)  # NaN anywhere in a row is its maximum
    if not np.isfinite(peaks).all():
        row = int((~np.isfinite(peaks)).argmax())
        raise InputError(
            f"logits of row {row} cannot be sampled",
            found=f"a largest value of {peaks[row]}",
            allowed="finite numbers (-inf for single tokens)",
            fix="check the model with `onnxlm verify`",
        )
