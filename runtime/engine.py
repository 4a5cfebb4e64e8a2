"""Prefill and decode sessions over one cache: tokens in, tokens or logits out. Knows nothing of text.

Shapes: B rows, S new tokens a row, P cached columns, T = P + S, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.errors import InputError
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.kv_cache import KVCache
from onnxlm.runtime.tokenizer import check_token_ids

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

# Tokens of a prompt that run at once: activations stay bounded, matrix products stay large.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Sessions:
    """What an engine runs.

    Attributes:
        prefill: Session of the prefill graph.
        decode: Session of the decode graph.
        states: The package's states.
        vocab_size: V.
        context_length: Most positions of a row.
        device: Device type and number of the buffers.
    """

    prefill: ort.InferenceSession
    decode: ort.InferenceSession
    states: tuple[StateSpec, ...]
    vocab_size: int
    context_length: int
    device: tuple[str, int] = ("cpu", 0)


class Batch:
    """The rows of one generation: their cache, their columns, and the step's buffers.

    Every column of the cache is in `mask`, padding as 0; tokens of one call are padded on the right.

    Attributes:
        cache: Key and value buffers.
        lengths: int64 [B], real tokens of each row.
        tokens: int64 [B, 1], the tokens that the next decode step reads; a greedy step overwrites them.
    """

    def __init__(self, sessions: Sessions, rows: int) -> None:
        self._sessions = sessions
        self.rows = rows
        self.cache = KVCache(sessions.states, rows, sessions.device)
        self.lengths: Ids = np.zeros(rows, dtype=np.int64)
        self._mask: Ids = np.zeros((rows, 0), dtype=np.int64)
        self._padded = False
        # One row without padding, the usual case, reads views of this and never builds a mask.
        self._ones: Ids = np.ones((rows, 0), dtype=np.int64)
        self.tokens = _on_device(np.zeros((rows, 1), dtype=np.int64), sessions.device)
        self._logits: ort.OrtValue | None = None
        self._bindings: dict[bool, ort.IOBinding] = {}

    @property
    def columns(self) -> int:
        """Cached columns, P."""
        return int(self._mask.shape[1])

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
        """Run one row's new tokens at once; the logits behind every one of them, float32 [S, V]."""
        logits: Floats = self._prefill([ids], io_spec.LOGITS, keep=len(ids))[0]
        return logits

    def _prefill(self, rows: Sequence[Sequence[int]], output: str, keep: int = 1) -> NDArray[Any]:
        """Run the rows in chunks; `keep` above 1 wants one chunk and equal lengths."""
        ids, lengths = _padded(rows, self._sessions.vocab_size)
        self._check_room(lengths)
        longest = ids.shape[1]
        real = np.arange(longest)[None, :] < lengths[:, None]
        if self.cache.reserve(self.columns + longest, self.columns):
            self._bindings.clear()
        result: NDArray[Any] | None = None
        step = longest if keep > 1 else PREFILL_CHUNK
        for start in range(0, longest, step):
            end = min(start + step, longest)
            part = self._run_chunk(ids[:, start:end], real[:, start:end], output, keep)
            if result is None:
                result = part
            else:
                here = lengths > start  # rows that have ended keep what their last chunk said
                result[here] = part[here]
        assert result is not None
        return result

    def _run_chunk(
        self, ids: Ids, real: NDArray[np.bool_], output: str, keep: int
    ) -> NDArray[np.generic]:
        sessions = self._sessions
        self._append(real)
        binding = sessions.prefill.io_binding()
        binding.bind_cpu_input(io_spec.INPUT_IDS, np.ascontiguousarray(ids))
        binding.bind_cpu_input(io_spec.ATTENTION_MASK, np.ascontiguousarray(self._mask))
        if keep != 1:  # the graph's default
            kept = ort.OrtValue.ortvalue_from_numpy(np.array(keep, dtype=np.int64))
            binding.bind_ortvalue_input(io_spec.LOGITS_TO_KEEP, kept)
        binding.bind_output(output, "cpu")
        self._bind_states(binding)
        sessions.prefill.run_with_iobinding(binding)
        first, *present = binding.get_outputs()
        if not self.cache.in_place:
            self.cache.take_present(present)
        array: NDArray[np.generic] = first.numpy()
        return array

    def decode_tokens(self, live: NDArray[np.bool_] | None = None) -> Ids:
        """One greedy step: run `tokens`, one a row, and put the arg-max there.

        Args:
            live: bool [B], rows that still grow; what comes of the others means nothing. All when None.

        Returns:
            int64 [B], the new tokens.

        Raises:
            InputError: The context is full.
        """
        self._step(False, live)
        tokens: Ids = self.tokens.numpy()
        return tokens[:, 0].copy()

    def decode_logits(self, live: NDArray[np.bool_] | None = None) -> Floats:
        """One step whose next token is chosen elsewhere: run `tokens` and leave them alone.

        Args:
            live: As in `decode_tokens`.

        Returns:
            float32 [B, V], a view that the next step overwrites.

        Raises:
            InputError: The context is full.
        """
        self._step(True, live)
        assert self._logits is not None
        logits: Floats = self._logits.numpy()
        return logits[:, 0]

    def _step(self, want_logits: bool, live: NDArray[np.bool_] | None) -> None:
        grows = np.ones(self.rows, dtype=np.bool_) if live is None else live
        self._check_room(grows)
        if self.cache.reserve(self.columns + 1, self.columns):
            self._bindings.clear()
        self._append(grows[:, None])
        binding = self._bindings.get(want_logits)
        if binding is None:
            binding = self._bind_decode(want_logits)
        self._bind_mask(binding)
        self._sessions.decode.run_with_iobinding(binding)
        if not self.cache.in_place:
            self.cache.take_present(binding.get_outputs()[1:])
            self._bindings.clear()

    def set_tokens(self, tokens: Ids) -> None:
        """Choose the tokens that the next step reads, int64 [B]."""
        if self._sessions.device[0] == "cpu":
            self.tokens.numpy()[:, 0] = tokens
        else:
            self.tokens.update_inplace(np.ascontiguousarray(tokens[:, None]))

    def rewind(self, columns: int) -> None:
        """Forget all but the first `columns` columns."""
        if not 0 <= columns <= self.columns:
            raise InputError(
                "rewind past what is cached", found=columns, allowed=f"0 to {self.columns}"
            )
        self._mask = self._mask[:, :columns]
        self.lengths = self._mask.sum(axis=1)
        if not self.cache.in_place:
            self.cache.keep_first(columns)
            self._bindings.clear()

    def _check_room(self, new_tokens: NDArray[Any]) -> None:
        longest = int((self.lengths + new_tokens).max())
        if longest > self._sessions.context_length:
            raise InputError(
                "the context is full",
                found=f"{longest} positions",
                allowed=f"up to {self._sessions.context_length}",
                fix="shorten the prompt or ask for fewer new tokens",
            )

    def _append(self, real: NDArray[np.bool_]) -> None:
        self._padded = self._padded or not bool(real.all())
        self.lengths = self.lengths + real.sum(axis=1)
        columns = self.columns + real.shape[1]
        if self._ones.shape[1] < columns:
            self._ones = np.ones((self.rows, 2 * columns), dtype=np.int64)
        if self._padded:
            self._mask = np.concatenate((self._mask, real.astype(np.int64)), axis=1)
        else:
            self._mask = self._ones.ravel()[: self.rows * columns].reshape(self.rows, columns)

    def _bind_mask(self, binding: ort.IOBinding) -> None:
        mask = np.ascontiguousarray(self._mask)
        self._mask = mask  # the binding keeps a pointer, not a reference
        binding.bind_input(io_spec.ATTENTION_MASK, "cpu", 0, np.int64, mask.shape, mask.ctypes.data)

    def _bind_decode(self, want_logits: bool) -> ort.IOBinding:
        binding = self._sessions.decode.io_binding()
        binding.bind_ortvalue_input(io_spec.INPUT_IDS, self.tokens)
        if want_logits:
            if self._logits is None:
                shape = (self.rows, 1, self._sessions.vocab_size)
                self._logits = _on_device(np.zeros(shape, dtype=np.float32), ("cpu", 0))
            binding.bind_ortvalue_output(io_spec.LOGITS, self._logits)
        else:
            # Read first, written last: one buffer carries the token from step to step.
            binding.bind_ortvalue_output(io_spec.NEXT_TOKENS, self.tokens)
        self._bind_states(binding)
        self._bindings[want_logits] = binding
        return binding

    def _bind_states(self, binding: ort.IOBinding) -> None:
        """Bind past and present, the present after what is bound already, in the order of the states."""
        for state in self._sessions.states:
            buffer = self.cache.buffers[state.past]
            binding.bind_ortvalue_input(state.past, buffer)
            if self.cache.in_place:
                binding.bind_ortvalue_output(state.present, buffer)
            else:
                binding.bind_output(state.present, *self._sessions.device)


def _padded(rows: Sequence[Sequence[int]], vocab_size: int) -> tuple[Ids, Ids]:
    """Ids [B, longest], padded on the right, and the lengths [B]."""
    checked = [check_token_ids(row, vocab_size) for row in rows]
    lengths = np.array([row.size for row in checked], dtype=np.int64)
    if not lengths.size or not lengths.all():
        raise InputError("a prompt is empty", fix="give at least one token")
    ids: Ids = np.zeros((len(checked), int(lengths.max())), dtype=np.int64)
    for i, row in enumerate(checked):
        ids[i, : row.size] = row
    return ids, lengths


def _on_device(array: NDArray[np.generic], device: tuple[str, int]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array, *device)
