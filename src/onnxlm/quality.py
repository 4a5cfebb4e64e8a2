"""How far one model's next-token distributions are from another's: KL divergence, top-1, perplexity.

Figures are gathered piece by piece, so that the logits of a long text never lie in memory at once.
Shapes: n positions, V vocabulary size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["good", "degraded", "collapsed"]

# Beyond these a package is another model: the next token is another one as often as not.
COLLAPSED_KL = 0.5
COLLAPSED_TOP1 = 0.5
# Beyond these text is visibly worse. 8-bit blocks reach 0.005 and 0.97, good 4-bit ones 0.06 and 0.88,
# 4-bit blocks rounded to nearest 0.3 and 0.74.
DEGRADED_KL = 0.1
DEGRADED_TOP1 = 0.85

# Values of float64 that one slice of a piece may have: 16 MB.
_SLICE_VALUES = 1 << 21


@dataclass(frozen=True)
class Quality:
    """Figures over the positions of a text.

    Attributes:
        tokens: Positions compared.
        kl: Mean KL divergence KL(reference || candidate), nats.
        kl_max: The largest at any position.
        top1: Share of positions whose most likely token is the same.
        perplexity_reference: Perplexity of the text under the reference.
        perplexity: The same under the candidate.
        perplexity_change: Relative change of the two, 0.01 for 1%.
    """

    tokens: int
    kl: float
    kl_max: float
    top1: float
    perplexity_reference: float
    perplexity: float
    perplexity_change: float

    @property
    def verdict(self) -> Verdict:
        """The figures in one word.

        "collapsed" past 0.5 nats, below half of the top-1, or a figure that is no number; "degraded" past
        0.1 nats or below 0.85 of the top-1.
        """
        if not math.isfinite(self.kl) or not math.isfinite(self.perplexity_change):
            return "collapsed"
        if self.kl > COLLAPSED_KL or self.top1 < COLLAPSED_TOP1:
            return "collapsed"
        return "degraded" if self.kl > DEGRADED_KL or self.top1 < DEGRADED_TOP1 else "good"

    def to_dict(self) -> dict[str, Any]:
        """JSON fields; what is no finite number is null."""
        figures = {
            name: value if math.isfinite(value) else None
            for name, value in dataclasses.asdict(self).items()
        }
        return {**figures, "verdict": self.verdict}


class LossMeter:
    """Takes pieces of one stream of logits over a text; says how well the text was foreseen."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    @property
    def tokens(self) -> int:
        """Positions so far."""
        return len(self._losses)

    @property
    def loss(self) -> float:
        """Mean of -ln p of the tokens that really followed, nats; there must be one."""
        return _mean(self._losses)

    @property
    def perplexity(self) -> float:
        """The exponential of `loss`."""
        return _exp(self.loss)

    def add(self, logits: NDArray[Any], targets: NDArray[np.int64]) -> None:
        """Take some positions.

        Args:
            logits: [n, V].
            targets: int64 [n], the token that really follows each position.
        """
        if logits.shape[:1] != targets.shape:
            raise ValueError(f"shapes {logits.shape}, {targets.shape}")
        for here in _slices(logits):
            self.add_log_probabilities(log_softmax(logits[here]), targets[here])

    def add_log_probabilities(self, log_p: NDArray[np.float64], targets: NDArray[np.int64]) -> None:
        """As `add`, for logits whose `log_softmax` is known."""
        self._losses += (-log_p[np.arange(len(targets)), targets]).tolist()


class QualityMeter:
    """Takes pieces of two streams of logits over one text.

    The result depends on the positions alone, not on how they were cut into pieces.

    Attributes:
        reference: Losses of the reference.
        candidate: Losses of the candidate.
    """

    def __init__(self) -> None:
        self._kl: list[float] = []
        self._same: list[bool] = []
        self.reference = LossMeter()
        self.candidate = LossMeter()

    @property
    def tokens(self) -> int:
        """Positions so far."""
        return len(self._kl)

    def add(
        self, reference: NDArray[Any], candidate: NDArray[Any], targets: NDArray[np.int64]
    ) -> None:
        """Take some positions.

        Args:
            reference: Logits [n, V].
            candidate: Logits [n, V].
            targets: int64 [n], the token that really follows each position.
        """
        if reference.shape != candidate.shape or reference.shape[:1] != targets.shape:
            raise ValueError(f"shapes {reference.shape}, {candidate.shape}, {targets.shape}")
        for here in _slices(reference):
            self._add(reference[here], candidate[here], targets[here])

    def _add(
        self, reference: NDArray[Any], candidate: NDArray[Any], targets: NDArray[np.int64]
    ) -> None:
        p, q = log_softmax(reference), log_softmax(candidate)
        with np.errstate(invalid="ignore"):  # -inf - -inf where a token is impossible
            terms = np.exp(p) * (p - q)
        # What the reference never says costs nothing, whatever the candidate thinks of it.
        terms[np.isneginf(p)] = 0.0
        # Below 0 it is by rounding only.
        self._kl += np.maximum(terms.sum(axis=1), 0.0).tolist()
        self._same += (reference.argmax(axis=1) == candidate.argmax(axis=1)).tolist()
        self.reference.add_log_probabilities(p, targets)
        self.candidate.add_log_probabilities(q, targets)

    def result(self) -> Quality:
        """The figures over every position so far, of which there must be one."""
        return Quality(
            tokens=self.tokens,
            kl=_mean(self._kl),
            kl_max=float(np.max(self._kl)),  # numpy's: a NaN anywhere is the result
            top1=sum(self._same) / self.tokens,
            perplexity_reference=self.reference.perplexity,
            perplexity=self.candidate.perplexity,
            perplexity_change=_exp(self.candidate.loss - self.reference.loss) - 1.0,
        )

    def kl_quantile(self, share: float) -> float:
        """The KL divergence, nats, that this share of the positions does not exceed.

        Between two positions it is interpolated linearly, as `numpy.quantile` does.
        """
        return float(np.quantile(self._kl, share))


def _slices(logits: NDArray[Any]) -> Iterator[slice]:
    """Rows of a piece that are looked at together."""
    rows = max(1, _SLICE_VALUES // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Logarithms of the probabilities, float64 [n, V].

    Args:
        logits: [n, V]; -inf for a token that cannot come.
    """
    shifted: NDArray[np.float64] = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        shifted -= shifted.max(axis=1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _mean(values: list[float]) -> float:
    # Exact sums, so that the order and the cutting of the positions do not matter.
    return (
        math.fsum(values) / len(values)
        if all(map(math.isfinite, values))
        else float(np.mean(values))
    )


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
