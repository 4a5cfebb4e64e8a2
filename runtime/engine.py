"""Prefill and decode sessions over one cache: tokens in, tokens or logits out. Knows nothing of text.

Shapes: B rows, S new tokens a row, P cached columns, T = P + S, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.errors import InputError
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.kv_cache import KVCache

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
        tokens: int64 [B, 1], the tokens that the next decode step reads; a greedy step overwrites them.
    """

    def __init__(self, sessions: Sessions, rows: int) -> None:
        self._sessions = sessions
        self.rows = rows
        self.cache = KVCache(sessions.states, rows, sessions.context_length, sessions.device)
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
        return self._mask.shape[1]

    def prefill(
        self, rows: Sequence[Sequence[int]], keep: int = 1, want_logits: bool = True
    ) -> NDArray[np.float32] | Ids:
        """Run new tokens of every row behind what is cached, in chunks.

        Args:
            rows: Token ids of each row, at least one.
            keep: Rows of logits to return, counted from each row's last token; more than 1 only when
                all rows have the same length and fit one chunk.
            want_logits: Return logits, not the arg-max.

        Returns:
            float32 [B, keep, V], or int64 [B, 1].
        """
        check_ids(rows, self._sessions.vocab_size)
        lengths = np.array([len(row) for row in rows])
        longest = int(lengths.max())
        ids: Ids = np.zeros((len(rows), longest), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        real = np.arange(longest)[None, :] < lengths[:, None]
        self.cache.reserve(self.columns + longest, self.columns)
        result: NDArray[np.float32] | Ids | None = None
        step = longest if keep > 1 else PREFILL_CHUNK
        for start in range(0, longest, step):
            end = min(start + step, longest)
            part = self._run_prefill(ids[:, start:end], real[:, start:end], keep, want_logits)
            if result is None:
                result = part
            else:
                here = lengths > start  # rows that have ended keep what their last chunk said
                result[here] = part[here]
        assert result is not None
        return result

    def _run_prefill(
        self, ids: Ids, real: NDArray[np.bool_], keep: int, want_logits: bool
    ) -> NDArray[np.float32] | Ids:
        sessions = self._sessions
        self._append(real)
        binding = sessions.prefill.io_binding()
        binding.bind_cpu_input(io_spec.INPUT_IDS, np.ascontiguousarray(ids))
        binding.bind_cpu_input(io_spec.ATTENTION_MASK, np.ascontiguousarray(self._mask))
        binding.bind_cpu_input(io_spec.LOGITS_TO_KEEP, np.array(keep, dtype=np.int64))
        name = io_spec.LOGITS if want_logits else io_spec.NEXT_TOKENS
        binding.bind_output(name, "cpu")
        self._bind_states(binding)
        sessions.prefill.run_with_iobinding(binding)
        first, *present = binding.get_outputs()
        if not self.cache.in_place:
            self.cache.take_present(present)
        array: NDArray[np.float32] | Ids = first.numpy()
        return array

    def decode(self, want_logits: bool) -> NDArray[np.float32] | Ids:
        """One step: run `tokens`, one a row.

        Args:
            want_logits: Return logits and leave `tokens` alone; otherwise put the arg-max into `tokens`.

        Returns:
            float32 [B, V], a view that the next step overwrites, or int64 [B, 1].

        Raises:
            InputError: The context is full.
        """
        if self.cache.reserve(self.columns + 1, self.columns):
            self._bindings.clear()
        self._append(np.ones((self.rows, 1), dtype=np.bool_))
        binding = self._bindings.get(want_logits)
        if binding is None:
            binding = self._bind_decode(want_logits)
        self._bind_mask(binding)
        self._sessions.decode.run_with_iobinding(binding)
        if not self.cache.in_place:
            self.cache.take_present(binding.get_outputs()[1:])
            self._bindings.clear()
        if want_logits:
            assert self._logits is not None
            logits: Floats = self._logits.numpy()[:, 0]
            return logits
        tokens: Ids = self.tokens.numpy()
        return tokens

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
        if not self.cache.in_place:
            self.cache.keep_first(columns)
            self._bindings.clear()

    def _append(self, real: NDArray[np.bool_]) -> None:
        self._padded = self._padded or not bool(real.all())
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


def check_ids(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuse empty rows and ids that the embedding table does not have.

    ONNX Runtime itself takes -1 as the last row of a table without complaint.

    Raises:
        InputError: Names the row, position and id.
    """
    if not rows:
        raise InputError("no prompt was given")
    for r, row in enumerate(rows):
        if not len(row):
            raise InputError(
                f"prompt {r} is empty", fix="give at least one token (the model adds none itself)"
            )
        ids = np.asarray(row)
        if ids.dtype.kind not in "iu":
            raise InputError(f"prompt {r}: token ids", found=ids.dtype, allowed="integers")
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if bad.size:
            raise InputError(
                f"prompt {r}: token id at position {bad[0]}",
                found=int(ids[bad[0]]),
                allowed=f"0 to {vocab_size - 1}",
            )


def _on_device(array: NDArray[np.generic], device: tuple[str, int]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array, *device)
