"""Beam search behind one prompt: which beams go on with which tokens, and which sequences are complete.

The rules are those of transformers' `generate(num_beams=...)`, so that sequences and scores are the same.
Shapes: K beams, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxlm.runtime.logprobs import TokenLogprob, largest, token_logprob
from onnxlm.runtime.penalties import Logits
from onnxlm.runtime.row_history import RowHistory

# Stands for no score at all; finite, because sums and powers of it are compared.
_NONE = -1e9


@dataclass(frozen=True)
class BeamSettings:
    """How one search goes.

    Attributes:
        beams: K.
        limit: New tokens a sequence may have, at least one.
        ends: Ids that complete a sequence.
        length_penalty: Scores are sums of log-probabilities over length to this power.
        early_stopping: See `SamplingParams`.
        logprobs: See `SamplingParams`.
    """

    beams: int
    limit: int
    ends: Collection[int] = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    logprobs: int | None = None


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

    def advance(self, ruled: Logits, own: NDArray[np.float64]) -> tuple[list[int], list[int]]:
        """Take the next tokens' log-probabilities and choose.

        Args:
            ruled: float [K, V], by row, after rules.
            own: float64 [K, V], by row, the model's own.

        Returns:
            Of each of the K rows, the row that it goes on from, and the token it goes on with. The best
            continuation of a beam stays in the beam's row.
        """
        settings = self._settings
        order = [beam.row for beam in self.running]
        totals = ruled[order] + np.array([beam.score for beam in self.running])[:, None]
        # So many that K of them are not complete, whatever the others are.
        count = max(2, 1 + len(settings.ends)) * settings.beams
        best = largest(totals.ravel(), count)
        parents, tokens = np.divmod(best, ruled.shape[1])
        scores = totals.ravel()[best]
        last = self._length + 1 >= settings.limit
        ended = np.array([last or token in settings.ends for token in tokens.tolist()])
        going_on = largest(scores + ended * _NONE, settings.beams)
        chosen = [
            self._extended(
                int(parents[i]), int(tokens[i]), float(scores[i] + ended[i] * _NONE), own
            )
            for i in going_on
        ]
        self._length += 1
        self._collect(parents, tokens, scores, ended, own)
        sources = self._place(chosen)
        self._check_end(bool(ended.all()))
        by_row = sorted(self.running, key=lambda beam: beam.row)
        return sources, [beam.token_ids[-1] for beam in by_row]

    def _extended(self, parent: int, token_id: int, score: float, own: NDArray[np.float64]) -> Beam:
        old, count = self.running[parent], self._settings.logprobs
        told = () if count is None else (token_logprob(own[old.row], token_id, count),)
        return Beam(
            score,
            old.row,
            (*old.token_ids, token_id),
            None if old.history is None else old.history.extended(token_id),
            (*old.logprobs, *told),
        )

    def _collect(
        self,
        parents: NDArray[np.int64],
        tokens: NDArray[np.int64],
        scores: NDArray[np.float64],
        ended: NDArray[np.bool_],
        own: NDArray[np.float64],
    ) -> None:
        """Keep what was completed by one of the K best continuations, if it is among the K best sequences."""
        beams = self._settings.beams
        if not self._promising or (self._settings.early_stopping is True and self._full):
            return
        share = float(self._length) ** self._settings.length_penalty
        for i in np.flatnonzero(ended[:beams]):
            score = float(scores[i]) / share
            self.complete.append(self._extended(int(parents[i]), int(tokens[i]), score, own))
        self.complete.sort(key=lambda beam: -beam.score)
        del self.complete[beams:]

    def _place(self, chosen: Sequence[Beam]) -> list[int]:
        """Give each chosen beam a row: its parent's, where no better one has taken that."""
        sources = list(range(self._settings.beams))
        taken = {beam.row for beam in chosen}
        free = [row for row in sources if row not in taken]
        staying: set[int] = set()
        self.running = []
        for beam in chosen:
            row = beam.row
            if row in staying:
                row = free.pop()
                sources[row] = beam.row
            staying.add(beam.row)
            placed = Beam(beam.score, row, beam.token_ids, beam.history, beam.logprobs)
            self.running.append(placed)
        return sources

    @property
    def _full(self) -> bool:
        return len(self.complete) >= self._settings.beams

    def _check_end(self, all_ended: bool) -> None:
        settings = self._settings
        # The longest that the best beam may become, or what it is; see transformers' pull request 20901.
        far = settings.early_stopping == "never" and settings.length_penalty > 0
        length = float(settings.limit if far else self._length)
        possible = self.running[0].score / length**settings.length_penalty
        worst = self.complete[-1].score if self._full else _NONE
        self._promising = self._promising and possible > worst
        full = settings.early_stopping is True and self._full
        self.done = not self._promising or full or all_ended
