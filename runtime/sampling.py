"""From logits to token ids: pure functions over rows, none of which sees its neighbours.

Order: temperature, then top-k, then top-p over the mass that top-k left, then one draw a row.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxlm.errors import InputError
from onnxlm.runtime.sampling_params import SamplingParams

Floats = NDArray[np.float32]

# The least number that float32 divides by without losing precision.
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
# Groups whose maxima bound the k-th largest value: one pass of maxima spares a partition of the vocabulary.
_GROUP = 64
# Above this width a nucleus is found by selection, below it by sorting all rows at once.
_SORTED_WIDTH = 2048


@dataclass(frozen=True)
class Candidates:
    """Tokens that may still be drawn.

    Attributes:
        logits: float32 [rows, n]; -inf for what a row cannot draw.
        ids: int64 [rows, n], the tokens of the columns; None where column and token are the same.
    """

    logits: Floats
    ids: NDArray[np.int64] | None = None

    def keep(self, kept: NDArray[np.bool_]) -> Candidates:
        """The columns marked in bool [rows, n], in their order; what else a row has becomes -inf."""
        width = kept.shape[1]
        rows, columns = np.divmod(np.flatnonzero(kept), width)
        counts = np.bincount(rows, minlength=len(kept))
        widest = int(counts.max(initial=0))
        if widest > width // 4:  # moving them costs more than it spares
            return Candidates(np.where(kept, self.logits, np.float32(-np.inf)), self.ids)
        places = np.arange(columns.size) - np.repeat(counts.cumsum() - counts, counts)
        logits = np.full((len(kept), widest), -np.inf, dtype=np.float32)
        ids = np.zeros((len(kept), widest), dtype=np.int64)
        logits[rows, places] = self.logits[rows, columns]
        ids[rows, places] = columns if self.ids is None else self.ids[rows, columns]
        return Candidates(logits, ids)


Filter = Callable[[Candidates], Candidates]


def sample(
    logits: Floats,
    params: SamplingParams,
    seeds: NDArray[np.uint64],
    steps: ArrayLike,
) -> NDArray[np.int64]:
    """The next token of every row.

    Args:
        logits: float32 [rows, vocab_size].
        params: Settings of all rows.
        seeds: uint64 [rows], from `row_seeds`; not looked at when greedy.
        steps: Tokens each row has drawn so far, [rows] or one number for all.

    Returns:
        int64 [rows]. A row's token depends on its own logits, seed and step alone.

    Raises:
        InputError: A row has NaN or no finite largest logit.
    """
    check_logits(logits)
    if params.greedy:
        return np.asarray(logits.argmax(axis=1), dtype=np.int64)
    candidates = Candidates(logits)
    for apply in filters(params):
        candidates = apply(candidates)
    return draw(candidates, uniforms(seeds, steps))


def filters(params: SamplingParams) -> tuple[Filter, ...]:
    """What narrows the candidates before a draw, in order."""
    return (
        partial(scale_temperature, temperature=params.temperature),
        partial(keep_top_k, k=params.top_k),
        partial(keep_top_p, p=params.top_p),
    )


def check_logits(logits: Floats) -> None:
    """Refuse rows that no rule can choose from: NaN, +inf, or nothing but -inf."""
    peaks = logits.max(axis=1)  # NaN anywhere in a row is its maximum
    if not np.isfinite(peaks).all():
        row = int((~np.isfinite(peaks)).argmax())
        raise InputError(
            f"logits of row {row} cannot be sampled",
            found=f"a largest value of {peaks[row]}",
            allowed="finite numbers (-inf for single tokens)",
            fix="check the model with `onnxlm verify`",
        )


def scale_temperature(candidates: Candidates, temperature: float) -> Candidates:
    """Divide the logits by a temperature above 0, as differences to the largest, which cannot overflow."""
    with np.errstate(over="ignore"):  # far below the largest becomes -inf, which is right
        logits = candidates.logits - candidates.logits.max(axis=1, keepdims=True)
        logits /= np.float32(max(temperature, _LEAST_TEMPERATURE))
    return Candidates(logits, candidates.ids)


def keep_top_k(candidates: Candidates, k: int) -> Candidates:
    """The k largest logits of each row; of equal ones the lower columns, as arg-max has it. 0 keeps all."""
    logits = candidates.logits
    if k == 0 or k >= logits.shape[1]:
        return candidates
    least = _kth_largest(logits, k)
    kept = logits >= least[:, None]
    counts = np.count_nonzero(kept, axis=1)
    for row in np.flatnonzero(counts > k):
        ties = np.flatnonzero(logits[row] == least[row])
        kept[row, ties[ties.size - (counts[row] - k) :]] = False
    return candidates.keep(kept)


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest tokens, largest first, whose share of the row's mass is at least p; one at the least.

    Of equal tokens the lower columns are kept. 1 keeps all.
    """
    if p >= 1.0:
        return candidates
    logits = candidates.logits
    if logits.shape[1] <= _SORTED_WIDTH:
        return candidates.keep(_nucleus_by_sorting(logits, p))
    return candidates.keep(np.stack([_nucleus_by_selection(row, p) for row in logits]))


def draw(candidates: Candidates, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """One token a row by inverse transform.

    Args:
        candidates: What may be drawn, in proportion to the exponential of its logit.
        uniform: float64 [rows] in [0, 1).

    Returns:
        int64 [rows].
    """
    mass = _weights(candidates.logits).astype(np.float64).cumsum(axis=1)
    # Strictly above: a token without mass is never the first column to get there.
    columns = (mass > (uniform * mass[:, -1])[:, None]).argmax(axis=1)
    if candidates.ids is not None:
        columns = candidates.ids[np.arange(columns.size), columns]
    return np.asarray(columns, dtype=np.int64)


def row_seeds(seed: int | None, rows: int) -> NDArray[np.uint64]:
    """uint64 [rows]: row r draws as a run alone with seed + r does; fresh ones where seed is None."""
    if seed is None:
        return np.frombuffer(secrets.token_bytes(8 * rows), dtype=np.uint64)
    return np.uint64(seed) + np.arange(rows, dtype=np.uint64)


def uniforms(seeds: NDArray[np.uint64], steps: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1) that depend on a row's seed and step alone, whatever was drawn before.

    Args:
        seeds: uint64 [rows].
        steps: [rows] or one number.

    Returns:
        float64 [rows], of 53 random bits.
    """
    counter = np.broadcast_to(np.asarray(steps, dtype=np.uint64), seeds.shape)
    zero = np.zeros_like(seeds)
    words = philox4x32((*_halves(counter), zero, zero), _halves(seeds))
    bits = (words[0] >> np.uint64(5) << np.uint64(26)) | (words[1] >> np.uint64(6))
    return bits.astype(np.float64) / 2.0**53


_Words = tuple[NDArray[np.uint64], ...]


def philox4x32(counter: _Words, key: _Words) -> _Words:
    """Philox-4x32-10 (Salmon et al. 2011), a counter-based generator: no state, any element by itself.

    Args:
        counter: Four uint64 arrays of 32-bit words, low word first.
        key: Two such arrays.

    Returns:
        Four such arrays.
    """
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second >> np.uint64(32)) ^ b ^ k, second & low
        c, d = (first >> np.uint64(32)) ^ d ^ m, first & low
        k, m = (k + np.uint64(0x9E3779B9)) & low, (m + np.uint64(0xBB67AE85)) & low
    return a, b, c, d


def _halves(words: NDArray[np.uint64]) -> _Words:
    return words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)


def _weights(logits: Floats) -> Floats:
    """Unnormalised probabilities, the largest 1."""
    with np.errstate(over="ignore"):
        weights: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights


def _kth_largest(logits: Floats, k: int) -> Floats:
    """float32 [rows]: the k-th largest value of each row."""
    rows, width = logits.shape
    groups = width // _GROUP
    if groups < 2 * k:
        kth: Floats = np.partition(logits, width - k, axis=1)[:, width - k]
        return kth
    peaks = logits[:, : groups * _GROUP].reshape(rows, _GROUP, groups).max(axis=1)
    # k groups reach the k-th largest peak, so at least k values do, and few more.
    floors = np.partition(peaks, groups - k, axis=1)[:, groups - k]
    few = [row[np.flatnonzero(row >= floor)] for row, floor in zip(logits, floors, strict=True)]
    return np.array([np.partition(v, v.size - k)[v.size - k] for v in few], dtype=np.float32)


def _nucleus_by_sorting(logits: Floats, p: float) -> NDArray[np.bool_]:
    """The nuclei of all rows at once, bool [rows, n]."""
    order = np.argsort(-logits, axis=1, kind="stable")
    mass = np.take_along_axis(_weights(logits), order, axis=1).astype(np.float64).cumsum(axis=1)
    needed = np.ones_like(order, dtype=np.bool_)
    needed[:, 1:] = mass[:, :-1] < p * mass[:, -1:]
    kept = np.empty_like(needed)
    np.put_along_axis(kept, order, needed, axis=1)
    return kept


def _nucleus_by_selection(logits: Floats, p: float) -> NDArray[np.bool_]:
    """The nucleus of one row, bool [n], by quickselect on mass: linear in n, however flat the row."""
    weights = _weights(logits[None])[0]
    total = float(weights.sum(dtype=np.float64))
    # All tokens below this share together weigh less than 1 - p: the nucleus is above it.
    floor = 0.5 * (1.0 - p) * total / weights.size
    rest = weights.compress(weights >= floor)
    # Mass that the tokens not decided yet must still give; above 0, so that one is kept.
    missing = max(p * total, float(np.finfo(np.float64).tiny))
    while rest.size > _SORTED_WIDTH:
        pivot = np.median(rest[:: max(1, rest.size // 63)])
        heavy, light = rest.compress(rest > pivot), rest.compress(rest < pivot)
        heavy_mass = float(heavy.sum(dtype=np.float64))
        equal = rest.size - heavy.size - light.size
        equal_mass = equal * float(pivot)
        if heavy_mass >= missing:
            rest = heavy
        elif heavy_mass + equal_mass >= missing or not light.size:
            rest, missing = np.full(equal, pivot), missing - heavy_mass
            break
        else:
            rest, missing = light, missing - heavy_mass - equal_mass
    rest = np.sort(rest)[::-1]
    mass = rest.astype(np.float64).cumsum()
    last = min(int(np.searchsorted(mass, missing)), rest.size - 1)
    kept: NDArray[np.bool_] = weights > rest[last]
    ties = np.flatnonzero(weights == rest[last])
    ties = ties[
        np.argsort(-logits[ties], kind="stable")
    ]  # near ties that float32 weights do not tell
    kept[ties[: np.count_nonzero(rest[: last + 1] == rest[last])]] = True
    return kept
