"""From logits to token ids: every row by its own settings, seed and step, none by its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxlm.errors import InputError
from onnxlm.runtime.arrays import Floats
from onnxlm.runtime.candidates import Candidates, draw
from onnxlm.runtime.randomness import fresh_seed
from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.truncation import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    scale_temperature,
)

Filter = Callable[[Candidates, ArrayLike], Candidates]


@dataclass(frozen=True)
class DrawSettings:
    """What rows are drawn by.

    Attributes:
        filters: What narrows the candidates, in order, with a setting of each row, [rows]; only those that
            change anything. No temperature changes which tokens are the k largest: the other rules have less
            to do when those are chosen first. A greedy row has a top_k of 1, and so its arg-max for only
            candidate.
        seeds: uint64 [rows].
        greedy: bool [rows].
    """

    filters: tuple[tuple[Filter, NDArray[Any]], ...]
    seeds: NDArray[np.uint64]
    greedy: NDArray[np.bool_]

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> DrawSettings:
        """Those of some rows; a row without a seed gets a fresh one."""
        seeds = [fresh_seed() if one.seed is None else one.seed for one in params]
        greedy = np.array([one.greedy for one in params], dtype=np.bool_)
        top_k = np.where(greedy, 1, [one.top_k for one in params])
        temperature = np.where(greedy, 1.0, [one.temperature for one in params])
        filters: tuple[tuple[Filter, NDArray[Any], float], ...] = (
            (keep_top_k, top_k, 0),
            (scale_temperature, temperature, 1.0),
            (keep_top_p, np.array([one.top_p for one in params]), 1.0),
            (keep_min_p, np.array([one.min_p for one in params]), 0.0),
            (keep_typical, np.array([one.typical_p for one in params]), 1.0),
        )
        active = tuple((apply, values) for apply, values, idle in filters if (values != idle).any())
        return cls(active, np.array(seeds, dtype=np.uint64), greedy)

    def rows(self, chosen: NDArray[np.int64]) -> DrawSettings:
        """Those of the rows at int64 [n]."""
        filters = tuple((apply, values[chosen]) for apply, values in self.filters)
        return DrawSettings(filters, self.seeds[chosen], self.greedy[chosen])


def sample(
    logits: Floats, settings: DrawSettings, uniform: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The next token of every row.

    Args:
        logits: float32 [rows, vocab_size], the largest of each row finite.
        settings: Of the same rows.
        uniform: float64 [rows] in [0, 1), from `uniforms` of the rows' seeds and steps.

    Returns:
        int64 [rows]. A row's token depends on its own logits, settings and number alone.
    """
    if settings.greedy.all():
        return np.asarray(logits.argmax(axis=1), dtype=np.int64)
    return draw(narrowed(Candidates(logits), settings), uniform)


def narrowed(candidates: Candidates, settings: DrawSettings) -> Candidates:
    """What may be drawn, by all rules in order."""
    for apply, values in settings.filters:
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
