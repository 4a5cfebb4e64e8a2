"""Prefill and decode sessions over one cache: tokens in, tokens or logits out. Knows nothing of text.

Shapes: B rows, S new tokens a row, P cached columns, T = P + S, V vocabulary size.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.errors import InputError
from onnxlm.progress import Progress, silent
from onnxlm.runtime.arrays import Flags, Floats, Ids
from onnxlm.runtime.device_buffers import on_host
from onnxlm.runtime.graph_calls import DecodeSteps, run_prefill
from onnxlm.runtime.kv_cache import new_cache
from onnxlm.runtime.row_places import RowPlaces
from onnxlm.runtime.sessions import Sessions
from onnxlm.runtime.tokenizer import check_token_ids

# Tokens of a prompt that run at once: activations stay bounded, matrix products stay large.
PREFILL_CHUNK = 256
# Of all rows together: tokens, and tokens by columns, as a head has so many scores. And the fewest columns
# that is made of it.
_CALL_TOKENS, _CALL_SCORES, _FEWEST_COLUMNS = 2048, 1 << 21, 64


def prompt_calls(rows: int, tokens: int) -> int:
    """How many calls run a prompt of so many tokens in each of so many rows, behind nothing."""
    calls = done = 0
    while done < tokens:
        done += _call_columns(rows, done)
        calls += 1
    return calls


def _call_columns(rows: int, cached: int) -> int:
    """Tokens of each row that one call runs: fewer in many rows, and behind a long past."""
    most = min(_CALL_TOKENS // rows, _CALL_SCORES // (rows * (cached + PREFILL_CHUNK)))
    return min(PREFILL_CHUNK, max(most, _FEWEST_COLUMNS))


class PromptCancelledError(Exception):
    """A prompt was given up between two chunks; those that have run are cached."""


class Batch:
    """The rows of one generation: their cache and the buffers of a decode step.

    Tokens count as cached when the call that runs them has ended well; after one that raised, an interrupt
    included, a batch is what it was before.

    Attributes:
        rows: B.
        cache: Key and value buffers, and how many tokens they hold; rows lie as `_places` says.
        cancelled: Once set, by any thread, a prompt ends behind the chunk that runs.
        progress: Told how many columns of a prompt have run, chunk by chunk, where there are several.
        counted: int64 [B], tokens of each row that count, while more are cached of which some may yet be
            undone; None while all count.
    """

    def __init__(self, sessions: Sessions, rows: int) -> None:
        self._sessions = sessions
        self.rows = rows
        self.cancelled = threading.Event()
        self.progress: Progress = silent
        self.counted: Ids | None = None
        self.cache = new_cache(
            sessions.states, rows, sessions.context_length, sessions.device, sessions.kv_budget
        )
        self._places = RowPlaces(rows)
        self._steps = DecodeSteps(sessions, rows)

    @property
    def lengths(self) -> Ids:
        """int64 [B], tokens of each row that are cached."""
        if self.counted is not None:
            return self.counted.copy()
        return self._places.by_row(self.cache.lengths)

    @property
    def context_length(self) -> int:
        """Most tokens of a row."""
        return self._sessions.context_length

    @property
    def call_columns(self) -> int:
        """Tokens of each row that the next call of a prompt best runs."""
        return _call_columns(self.cache.running, int(self.cache.lengths.max()))

    def prefill_tokens(self, rows: Sequence[Sequence[int]]) -> Ids:
        """Run new tokens of every row behind what is cached; the arg-max behind each row, int64 [B].

        Raises:
            InputError: A row is empty, an id is out of bounds, or the context would be passed.
        """
        tokens: Ids = self._prefill(rows, io_spec.NEXT_TOKENS)[:, 0]
        return tokens

    def prefill_logits(self, rows: Sequence[Sequence[int]]) -> Floats:
        """Like `prefill_tokens`, but the logits behind each row's last token, float32 [B, V]."""
        logits: Floats = self._prefill(rows, io_spec.LOGITS)[:, 0]
        return logits

    def prefill_all_logits(self, ids: Sequence[int]) -> Floats:
        """Run the new tokens of the only row at once; the logits behind every one of them, float32 [S, V]."""
        logits: Floats = self._prefill([ids], io_spec.LOGITS, keep=len(ids))[0]
        return logits

    def extend_logits(self, rows: Sequence[Sequence[int]]) -> Floats:
        """Run new tokens of some rows at once; the logits behind every one of them.

        Args:
            rows: New tokens of each row; none of a row that does not go on.

        Returns:
            float32 [B, S, V], flush right: of a row with n tokens, the last n count.
        """
        longest = max(map(len, rows))
        logits: Floats = self._prefill(rows, io_spec.LOGITS, keep=longest, some=True)
        return logits

    def _prefill(
        self,
        rows: Sequence[Sequence[int]],
        output: str,
        keep: int | None = None,
        some: bool = False,
    ) -> NDArray[Any]:
        """Run the rows in chunks, or in one of which `keep` logits are wanted; `output` behind each row."""
        ids, counts = self._padded(rows, some)
        longest = ids.shape[1]
        call = min(longest, keep or PREFILL_CHUNK)
        self._make_room(longest, call)  # refused before any work is done
        results: NDArray[Any] | None = None
        start = 0
        while start < longest:
            if start and self.cancelled.is_set():
                raise PromptCancelledError
            self._choose((counts > start).tolist())
            order = self._places.rows[: self.cache.running]
            room = self.cache.room(counts[order] > start)
            end = min(start + (keep or self.call_columns), start + room, longest)
            real = np.arange(start, end) < counts[order, None]
            self._make_room(end - start, end - start)
            piece = ids[order, start:end]
            result = run_prefill(self._sessions.prefill, self.cache, piece, real, (output, keep))
            if len(order) == 1 == self.rows:
                results = result
            else:
                if results is None:
                    results = np.zeros((self.rows, *result.shape[1:]), dtype=result.dtype)
                here = real[:, 0]  # rows that have ended keep what their last chunk said
                results[order[here]] = result[here]
            if start or end < longest:
                self.progress("prompt", end, longest)
            start = end
        assert results is not None
        return results

    def decode_tokens(self, live: Flags | None = None) -> Ids:
        """One greedy step: run `tokens`, one a row, and put the arg-max there.

        Args:
            live: bool [B], rows that still grow; what comes of the others means nothing. All when None.

        Returns:
            int64 [B], the new tokens.

        Raises:
            InputError: The context is full.
        """
        self._step(io_spec.NEXT_TOKENS, live)
        return self._places.by_row(self._steps.tokens.numpy()[:, 0]).copy()

    def decode_logits(self, live: Flags | None = None) -> Floats:
        """One step whose next token is chosen elsewhere: run `tokens` and leave them alone.

        Args:
            live: As in `decode_tokens`.

        Returns:
            float32 [B, V], which may be a view that the next step overwrites.

        Raises:
            InputError: The context is full.
        """
        self._step(io_spec.LOGITS, live)
        return self._places.by_row(self._steps.logits)

    def _step(self, output: str, live: Flags | None) -> None:
        alive = [True] * self.rows if live is None else live.tolist()
        self._check_room(alive)
        self._make_room(1, 1)
        self._choose(alive)
        running = self.cache.running
        mask = self.cache.step_mask(alive if running == self.rows else [1] * running)
        self._steps.run(output, self.cache, mask)

    def _choose(self, live: Sequence[bool]) -> None:
        """Have the next call run the marked rows only, where the cache can leave rows out."""
        if not self.cache.partial:
            return
        moves = self._places.arrange(live)
        if moves is not None:
            self.cache.reorder(moves)
            tokens = self._steps.tokens.numpy()
            tokens[:] = tokens[moves]
        self.cache.run_first(self._places.running)

    def settle(self) -> None:
        """Nothing was run ahead."""

    def set_tokens(self, tokens: Sequence[int] | Ids) -> None:
        """Choose the tokens that the next step reads, [B].

        Raises:
            InputError: An id is out of bounds.
        """
        ids = check_token_ids(tokens, self._sessions.vocab_size)
        self._steps.tokens.update_inplace(ids[self._places.rows].reshape(self.rows, 1))

    def fork(self) -> Batch:
        """Another batch that holds the same tokens; from here on the two share nothing."""
        other = Batch(self._sessions, self.rows)
        other.cache = self.cache.fork()
        other._places = copy.deepcopy(self._places)
        other.rewind(self.lengths)
        return other

    def rewind(self, lengths: int | Ids) -> Ids:
        """Forget all but the first tokens of each row, int64 [B] or one number for all.

        Returns:
            int64 [B], how many each row still has: those, or none, where a sliding window has lost tokens
            that the next one would see.

        Raises:
            InputError: A row has fewer tokens.
        """
        wanted = np.broadcast_to(np.asarray(lengths, dtype=np.int64), (self.rows,))
        if (wanted < 0).any() or (wanted > self.lengths).any():
            raise InputError(
                "a cache can be rewound to what it holds",
                found=wanted.tolist(),
                allowed=f"0 to {self.lengths.tolist()}",
            )
        if (wanted < self.lengths).any():
            kept = self.cache.rewind(wanted[self._places.rows])
            return self._places.by_row(kept)
        return wanted

    def expect(self, rows: int) -> None:
        """Have the next prompt see to room for so many rows, which `reorder` will make of these."""
        self.cache.expected = rows

    def reorder(self, rows: Ids) -> None:
        """Let row i go on from what row `rows[i]` holds, int64 [new B]; a row may be taken several times.

        Every row must hold tokens. What the next step reads is to be set anew.
        """
        if rows.size != self.rows or not on_host(self._sessions.device):  # buffers become others
            self._steps.resize(rows.size)
            self.rows = rows.size
        self.cache.reorder(self._places.places[rows])
        self._places = RowPlaces(self.rows)

    def inputs(
        self, rows: Sequence[Sequence[int]], graph: str = io_spec.PREFILL
    ) -> dict[str, NDArray[Any]]:
        """What a call with these new tokens would be fed, by graph input; nothing is run.

        Args:
            rows: As in `prefill_tokens`; one token a row for the decode graph.
            graph: The graph's name.

        Raises:
            InputError: As in `prefill_tokens`.
        """
        ids, counts = self._padded(rows)
        self._make_room(ids.shape[1], ids.shape[1])
        self._choose([True] * self.rows)
        order = self._places.rows
        if graph == io_spec.DECODE:
            mask = self.cache.step_mask([1] * self.rows)
        else:
            mask = self.cache.chunk_mask(np.arange(ids.shape[1]) < counts[order, None])
        pasts = {name: buffer.numpy() for name, buffer in self.cache.buffers.items()}
        feeds = {io_spec.ATTENTION_MASK: mask, **pasts}
        if self.cache.evicted is not None:
            feeds[io_spec.EVICTED] = self.cache.evicted.numpy()
        return {io_spec.INPUT_IDS: ids} | {n: self._places.by_row(a) for n, a in feeds.items()}

    def _padded(self, rows: Sequence[Sequence[int]], some: bool = False) -> tuple[Ids, Ids]:
        """Checked ids [B, longest], padded on the right, and the number of each row's [B].

        Args:
            rows: Of each row.
            some: Whether there may be rows without any.
        """
        if len(rows) != self.rows:
            raise ValueError(f"{len(rows)} rows for a batch of {self.rows}")
        checked = [check_token_ids(row, self._sessions.vocab_size) for row in rows]
        counts = np.array([row.size for row in checked], dtype=np.int64)
        if not (counts.any() if some else counts.all()):
            raise InputError("a prompt is empty", fix="give at least one token")
        self._check_room(counts.tolist())
        ids: Ids = np.zeros((self.rows, int(counts.max())), dtype=np.int64)
        for i, row in enumerate(checked):
            ids[i, : row.size] = row
        return ids, counts

    def _check_room(self, counts: Sequence[int]) -> None:
        longest = self.cache.longest(self._places.by_place(counts))
        if longest > self._sessions.context_length:
            raise InputError(
                "the context is full",
                found=f"{longest} positions",
                allowed=f"up to {self._sessions.context_length}",
                fix="shorten the prompt or ask for fewer new tokens",
            )

    def _make_room(self, columns: int, call: int) -> None:
        """Room for new columns, of which one call has so many."""
        self.cache.evict(call)
        if not self.cache.fits(columns, call):
            self._steps.forget()  # first, so that old buffers go while new ones come
            self.cache.grow(columns, call)
