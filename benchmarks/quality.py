"""How far a model's logits are from the reference's: KL divergence, top-1 agreement, perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Quality:
    """Figures over the positions of one text.

    Attributes:
        kl: Mean of KL(reference || model) in nats.
        top1: Share of positions with the same most likely token.
        perplexity: Of the model on the text's own next tokens.
        perplexity_change: Relative to the reference's.
        positions: How many were compared.
    """

    kl: float
    top1: float
    perplexity: float
    perplexity_change: float
    positions: int


def compare(reference: Iterable[Floats], model: Iterable[Floats], ids: Sequence[int]) -> Quality:
    """Compare logits behind every token of a text.

    Args:
        reference: Chunks [n, vocab] of the reference's logits, in order.
        model: Chunks of the same sizes.
        ids: The text's token ids; the token behind position i is i + 1.
    """
    kl = agree = 0.0
    loss = reference_loss = 0.0
    done = 0
    for expected, found in zip(reference, model, strict=True):
        p, q = log_softmax(expected), log_softmax(found)
        kl += float((np.exp(p) * (p - q)).sum())
        agree += int((expected.argmax(1) == found.argmax(1)).sum())
        targets = np.asarray(ids[done + 1 : done + 1 + len(p)])
        rows = np.arange(len(targets))  # the last token of the text has no target
        loss -= float(q[rows, targets].sum())
        reference_loss -= float(p[rows, targets].sum())
        done += len(p)
    if done != len(ids):
        raise ValueError(f"logits behind {done} tokens, the text has {len(ids)}")
    perplexity = math.exp(loss / (done - 1))
    change = perplexity / math.exp(reference_loss / (done - 1)) - 1
    return Quality(kl / done, agree / done, perplexity, change, done)


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Logarithms of the softmax of each row, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide
