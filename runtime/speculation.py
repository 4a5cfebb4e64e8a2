"""Decoding with guesses: several tokens of a row run in one call, and those that turn out wrong are undone.

It takes a batch's place in the token loop, which sees one token a row and step as ever, and the same ones:
the logits behind a guess are handed out only when the loop has chosen just that token. So greedy tokens are
the arg-max as before. For draws this is rejection sampling: the loop draws from its own distribution p, so a
guess g passes with probability p(g), and what comes otherwise is distributed as p without g, renormalised:
the rule of Leviathan et al. 2023 for a draft that is certain of itself.

Attention over several new tokens sums in another order than over one. In fp32 that is 1e-5 of a logit.
Kernels that round activations to 8 bits make another rounding of it, as large as their error (KL as before),
so a near tie may fall otherwise than in plain steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxlm.errors import InputError
from onnxlm.runtime.arrays import Flags, Floats, Ids
from onnxlm.runtime.draft_policy import DraftPolicy, StepCosts
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.prompt_lookup import Draft, RowDrafts

# What "auto" looks at in one call, at the most.
_AUTO = 10
_Step = Callable[[Flags], NDArray[Any]]


class SpeculativeBatch:
    """A batch whose steps may have been run ahead.

    Args:
        batch: What runs.
        held: Tokens of each row that `batch` holds already.
        most: Most guessed tokens of each row and call; a row that allows none is never ahead, nor are the
            others while it runs.
        costs: What calls of these sessions cost.
    """

    def __init__(
        self,
        batch: Batch,
        held: Sequence[Sequence[int]],
        most: Sequence[int],
        costs: StepCosts,
    ) -> None:
        self._batch = batch
        self._most = list(most)
        self._costs = costs
        self._policy = DraftPolicy(costs)
        self._rows = [RowDrafts(ids) for ids in held]
        self._lengths: Ids = batch.lengths
        self._chosen: Ids = np.zeros(batch.rows, dtype=np.int64)
        self._chain = False  # whether the batch's own next tokens are the ones chosen
        self._ahead: _Ahead | None = None
        # Guesses that are not run, only held against what comes.
        self._watched: list[_Watched | None] = [None] * batch.rows

    @property
    def rows(self) -> int:
        """B."""
        return self._batch.rows

    @property
    def lengths(self) -> Ids:
        """int64 [B], tokens of each row that are cached and count."""
        return self._lengths.copy()

    def prefill_tokens(self, rows: Sequence[Sequence[int]]) -> Ids:
        """As `Batch.prefill_tokens`."""
        self.settle()
        tokens = self._batch.prefill_tokens(rows)
        self._prefilled(rows)
        return tokens

    def prefill_logits(self, rows: Sequence[Sequence[int]]) -> Floats:
        """As `Batch.prefill_logits`."""
        self.settle()
        logits = self._batch.prefill_logits(rows)
        self._prefilled(rows)
        return logits

    def reorder(self, rows: Ids) -> None:
        """As `Batch.reorder`."""
        self.settle()
        self._batch.reorder(rows)
        self._rows = [self._rows[row].copy() for row in rows]
        self._most = [self._most[row] for row in rows]
        self._lengths = self._batch.lengths
        self._chosen, self._chain = self._chosen[rows], False
        self._watched = [None] * rows.size

    def set_tokens(self, tokens: Sequence[int] | Ids) -> None:
        """As `Batch.set_tokens`."""
        self._chosen, self._chain = np.array(tokens, dtype=np.int64), False

    def decode_tokens(self, live: Flags | None = None) -> Ids:
        """As `Batch.decode_tokens`."""
        alive = self._begin(live)
        if self._ahead is None and not self._run_ahead(alive):
            self._chosen = self._timed_step(self._batch.decode_tokens, alive).copy()
            self._chain = True
        else:
            assert self._ahead is not None
            self._chosen, self._chain = self._ahead.tokens(), False
        self._lengths[alive] += 1
        return self._chosen.copy()

    def decode_logits(self, live: Flags | None = None) -> Floats:
        """As `Batch.decode_logits`."""
        alive = self._begin(live)
        if self._ahead is None and not self._run_ahead(alive):
            logits: Floats = self._timed_step(self._batch.decode_logits, alive)
        else:
            assert self._ahead is not None
            logits = self._ahead.logits()
        self._lengths[alive] += 1
        return logits

    def settle(self) -> None:
        """Undo what was run ahead and not used."""
        if self._ahead is not None:
            self._batch.counted = None
            self._batch.rewind(self._lengths)
            self._ahead = None

    def _prefilled(self, rows: Sequence[Sequence[int]]) -> None:
        self._lengths = self._batch.lengths
        for row, ids in zip(self._rows, rows, strict=True):
            for token_id in ids:
                row.append(token_id)

    def _begin(self, live: Flags | None) -> Flags:
        """Take note of the tokens chosen last; what was run ahead stays only if it is behind just these."""
        alive = np.ones(self.rows, dtype=np.bool_) if live is None else live
        rows = np.flatnonzero(alive)
        for row in rows:
            self._rows[row].append(int(self._chosen[row]))
            self._watch(int(row), int(self._chosen[row]))
        ahead = self._ahead
        if ahead is not None and not ahead.advance(self._chosen, rows, self._policy):
            self.settle()
        return alive

    def _watch(self, row: int, token_id: int) -> None:
        watched = self._watched[row]
        if watched is not None and watched.ended(token_id, self._policy):
            self._watched[row] = None

    def _run_ahead(self, alive: Flags) -> bool:
        """Run guesses behind the chosen tokens, if there are any that pay."""
        rows = np.flatnonzero(alive)
        room = self._batch.context_length - 1 - int(self._lengths[rows].max())
        drafts = [self._rows[row].draft(min(self._most[row], room)) for row in rows]
        count = self._policy.count(drafts)
        for row, draft in zip(rows, drafts, strict=True):
            if count:
                self._watched[row] = None
            elif draft is not None and self._watched[row] is None:
                self._watched[row] = _Watched(draft)
        if not count:
            return False
        known = [Draft(draft.ids[:count], draft.match) for draft in drafts if draft is not None]
        new: list[list[int]] = [[] for _ in range(self.rows)]
        for row, draft in zip(rows, known, strict=True):
            new[row] = [int(self._chosen[row]), *draft.ids]
        began = time.perf_counter()
        try:
            logits = self._batch.extend_logits(new)
        except InputError:  # no room for all of them; a step may have its own
            return False
        self._costs.add(rows.size, 1 + count, time.perf_counter() - began)
        self._ahead = _Ahead(logits, rows, known)
        self._batch.counted = self._lengths
        return True

    def _timed_step(self, step: _Step, alive: Flags) -> NDArray[Any]:
        if not self._chain:
            self._batch.set_tokens(self._chosen)
        began = time.perf_counter()
        result = step(alive)
        self._costs.add(int(alive.sum()), 1, time.perf_counter() - began)
        return result


class _Ahead:
    """A call that ran guesses, and how far the loop has come in it.

    Args:
        logits: float32 [B, S, V], behind the token chosen before and each guess.
        rows: int64 [n], the rows that it ran.
        drafts: Their guesses, S - 1 of each.
    """

    def __init__(self, logits: Floats, rows: Ids, drafts: Sequence[Draft]) -> None:
        self._logits = logits
        self._best: Ids | None = None
        self._drafts = dict(zip(rows.tolist(), drafts, strict=True))
        self._at = 0

    def logits(self) -> Floats:
        """float32 [B, V], behind the tokens that the loop has come to."""
        return self._logits[:, self._at]

    def tokens(self) -> Ids:
        """int64 [B], the arg-max of `logits`."""
        if self._best is None:
            self._best = self._logits.argmax(axis=2)
        return self._best[:, self._at].copy()

    def advance(self, chosen: Ids, rows: Ids, policy: DraftPolicy) -> bool:
        """Go on to what is behind the chosen tokens of rows that still run; False where there is none."""
        drafts = {row: self._drafts[row] for row in rows.tolist()}
        right = {
            row: self._at < len(draft.ids) and draft.ids[self._at] == chosen[row]
            for row, draft in drafts.items()
        }
        if all(right.values()):
            self._at += 1
            return True
        for row, draft in drafts.items():
            at_end = self._at == len(draft.ids)
            policy.learn(draft.match, self._at + right[row], not right[row] and not at_end)
        return False


class _Watched:
    """A guess that is not run, and how far it has come true."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._at = 0

    def ended(self, token_id: int, policy: DraftPolicy) -> bool:
        """Whether the next token is the last that it says anything of."""
        right = self._draft.ids[self._at] == token_id
        self._at += right
        if right and self._at < len(self._draft.ids):
            return False
        policy.learn(self._draft.match, self._at, not right)
        return True


def speculative(
    batch: Batch,
    held: Sequence[Sequence[int]],
    guesses: Sequence[int | str | None],
    costs: StepCosts,
) -> Batch | SpeculativeBatch:
    """A batch that runs guesses ahead, where any row asks for them; else the batch itself.

    Args:
        batch: What runs.
        held: Tokens of each row that it holds already; empty where it holds none.
        guesses: What each row asks for, see `SamplingParams.prompt_lookup_num_tokens`.
        costs: What calls of its sessions cost.
    """
    if all(one is None for one in guesses):
        return batch
    most = [_AUTO if one == "auto" else int(one or 0) for one in guesses]
    return SpeculativeBatch(batch, held or [()] * batch.rows, most, costs)
