"""Beam search behind one prompt: which beams go on with which tokens, and which sequences are complete.

The rules are those of transformers' `generate(num_beams=...)`, so that sequences and scores are the same.
Shapes: K beams, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from onnxlm.runtime.logprobs import TokenLogprob
from onnxlm.runtime.penalties import Logits
from onnxlm.runtime.row_history import RowHistory
from onnxlm.runtime.selection import largest

# Stands for no score at all; finite, because sums and powers of it are compared.
_NONE = -1e9
# Long sequences to a power of -100 are nothing at all.
_LEAST_SHARE = sys.float_info.min

# What is told of a token that a row goes on with.
Tell = Callable[[int, int], TokenLogprob]


@dataclass(frozen=True)
class BeamSettings:
    """How one search goes.

    Attributes:
        beams: K.
        limit: New tokens a sequence may have, at least one.
        ends: Ids that complete a sequence.
        length_penalty: Scores are sums of log-probabilities over length to this power.
        early_stopping: See `SamplingParams`.
    """

    beams: int
    limit: int
    ends: Collection[int] = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False


@dataclass(frozen=True)
class Beam:
    """One sequence.

    Attributes:
        score: Sum of log-probabilities; of a complete sequence, over length to the power of length_penalty.
        row: Where its cache is, among the search's K rows.
        token_ids: New tokens.
        history: All tokens, for rules that ask; None where there is none.
        logprobs: Of the new tokens, where they are asked for.
    """

    score: float
    row: int
    token_ids: tuple[int, ...] = ()
    history: RowHistory | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class BeamSearch:
    """The beams of one prompt.

    Args:
        settings: How it goes.
        history: What the prompt holds, where rules ask.

    Attributes:
        running: The beams that go on, best first.
        complete: The best complete sequences so far, best first; K at most.
        done: Whether no beam goes on any more.
    """

    def __init__(self, settings: BeamSettings, history: RowHistory | None = None) -> None:
        self._settings = settings
        self._length = 0
        self._promising = True
        # All K begin alike: only the first may be chosen from.
        scores = [0.0, *[_NONE] * (settings.beams - 1)]
        self.running = [Beam(score, row, history=history) for row, score in enumerate(scores)]
        self.complete: list[Beam] = []
        self.done = False

    def advance(self, ruled: Logits, tell: Tell | None = None) -> tuple[list[int], list[int]]:
        """Take the next tokens' log-probabilities and choose.

        Args:
            ruled: Log-probabilities after rules, float [K, V], by row.
            tell: Gives what is told of a row's next token, where anything is.

        Returns:
            Of each of the K rows, the row that it goes on from, and the token it goes on with. The best
            continuation of a beam stays in the beam's row.
        """
        settings = self._settings
        order = [beam.row for beam in self.running]
        totals = (ruled[order] + np.array([beam.score for beam in self.running])[:, None]).ravel()
        # So many that K of them are not complete, whatever the others are.
        best = largest(totals, max(2, 1 + len(settings.ends)) * settings.beams)
        pairs = [divmod(place, ruled.shape[1]) for place in best.tolist()]
        last = self._length + 1 >= settings.limit
        ended = np.array([last or token in settings.ends for _, token in pairs])
        going_on = totals[best] + ended * _NONE
        chosen = [
            self._extended(pairs[i], float(going_on[i]), tell)
            for i in largest(going_on, settings.beams)
        ]
        self._length += 1
        if self._promising and not self._closed:
            # Of the K best continuations only: the others are there to go on.
            ending = [
                self._extended(pairs[i], self._mean(float(totals[best[i]]), self._length), tell)
                for i in np.flatnonzero(ended[: settings.beams])
            ]
            # A new list, as the one below: another thread may look at what there is so far.
            ranked = sorted([*self.complete, *ending], key=lambda beam: -beam.score)
            self.complete = ranked[: settings.beams]
        sources = self._place(chosen)
        self._check_end(bool(ended.all()))
        by_row = sorted(self.running, key=lambda beam: beam.row)
        return sources, [beam.token_ids[-1] for beam in by_row]

    def _extended(self, pair: tuple[int, int], score: float, tell: Tell | None) -> Beam:
        parent, token_id = pair
        old = self.running[parent]
        return Beam(
            score,
            old.row,
            (*old.token_ids, token_id),
            None if old.history is None else old.history.extended(token_id),
            old.logprobs if tell is None else (*old.logprobs, tell(old.row, token_id)),
        )

    def _place(self, chosen: Sequence[Beam]) -> list[int]:
        """Give each chosen beam a row: its parent's, where no better one has taken that."""
        sources = list(range(self._settings.beams))
        taken = {beam.row for beam in chosen}
        free = [row for row in sources if row not in taken]
        staying: set[int] = set()
        running = []
        for beam in chosen:
            row = beam.row
            if row in staying:
                row = free.pop()
                sources[row] = beam.row
            staying.add(beam.row)
            running.append(Beam(beam.score, row, beam.token_ids, beam.history, beam.logprobs))
        self.running = running
        return sources

    def _mean(self, total: float, length: int) -> float:
        """A sum of log-probabilities over the length to the power of length_penalty."""
        try:
            share: float = float(length) ** self._settings.length_penalty
        except OverflowError:
            share = math.inf
        return total / max(share, _LEAST_SHARE)

    @property
    def _full(self) -> bool:
        return len(self.complete) >= self._settings.beams

    @property
    def _closed(self) -> bool:
        """Whether no complete sequence is taken any more."""
        return self._settings.early_stopping is True and self._full

    def _check_end(self, all_ended: bool) -> None:
        settings = self._settings
        # The longest that the best beam may become, or what it is; see transformers' pull request 20901.
        far = settings.early_stopping == "never" and settings.length_penalty > 0
        possible = self._mean(self.running[0].score, settings.limit if far else self._length)
        worst = self.complete[-1].score if self._full else -math.inf
        self._promising = self._promising and possible > worst
        self.done = not self._promising or self._closed or all_ended
