"""Calls of the two graphs: inputs and outputs bound to a batch's buffers.

Shapes: B rows, S new tokens a row, V vocabulary size. Rows are in the order that they have in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.runtime.arrays import Flags, Floats, Ids
from onnxlm.runtime.device_buffers import HOST, on_host, placed
from onnxlm.runtime.graph_capture import Captures
from onnxlm.runtime.kv_cache import KVCache
from onnxlm.runtime.session import run_bound
from onnxlm.runtime.sessions import Sessions
from onnxlm.runtime.state_buffers import bind_rows


def run_prefill(
    session: ort.InferenceSession,
    cache: KVCache,
    ids: Ids,
    real: Flags,
    wanted: tuple[str, int | None],
) -> NDArray[Any]:
    """Run new tokens of the rows that the cache runs, behind what it holds; there must be room.

    Args:
        session: Session of the prefill graph.
        cache: Where keys and values are.
        ids: int64 [rows, S], padded on the right.
        real: bool [rows, S], which of them are no padding.
        wanted: An output, and of how many of the last positions; None leaves that to the graph.

    Returns:
        The output, [rows, positions, ...].
    """
    output, keep = wanted
    binding = session.io_binding()
    binding.bind_cpu_input(io_spec.INPUT_IDS, np.ascontiguousarray(ids))
    binding.bind_cpu_input(io_spec.ATTENTION_MASK, cache.chunk_mask(real))
    if keep is not None:
        # An input with a default is not among those that `bind_cpu_input` knows.
        kept = placed(np.array(keep, dtype=np.int64), HOST)
        binding.bind_ortvalue_input(io_spec.LOGITS_TO_KEEP, kept)
    binding.bind_output(output, *HOST.place)
    cache.bind(binding)
    run_bound(session, binding)
    cache.commit(binding)
    array: NDArray[Any] = binding.get_outputs()[0].numpy()
    return array


class DecodeSteps:
    """The decode steps of one batch: bound once, and again only where a buffer has become another.

    Args:
        sessions: Whose decode session runs.
        rows: B.

    Attributes:
        tokens: int64 [B, 1], what the next step reads; a greedy step overwrites it.
    """

    def __init__(self, sessions: Sessions, rows: int) -> None:
        self._sessions = sessions
        self._device = sessions.device
        self._captures = Captures(sessions.decode) if sessions.graph_capture else None
        # By what is put out and how many rows run, with the mask; they hold on to the cache's buffers.
        self._bindings: dict[tuple[str, int], tuple[ort.IOBinding, Ids]] = {}
        # A device's copies of those masks.
        self._masks: dict[tuple[str, int], ort.OrtValue] = {}
        self._place(rows)

    @property
    def logits(self) -> Floats:
        """float32 [B, V], what the last step of that output has put out; a view that the next overwrites."""
        assert self._logits is not None
        logits: Floats = self._logits.numpy()[:, 0]
        return logits

    def run(self, output: str, cache: KVCache, mask: Ids) -> None:
        """One step of the rows that the cache runs.

        Args:
            output: Which output is wanted: next_tokens, put into `tokens`, or logits.
            cache: Where keys and values are.
            mask: Its `step_mask`.
        """
        key = (output, cache.running)
        binding, bound = self._bindings.get(key) or (self._bind(output, cache), None)
        if not on_host(self._device):
            self._upload_mask(key, binding, mask)
        elif bound is not mask:
            binding.bind_cpu_input(io_spec.ATTENTION_MASK, mask)
        self._bindings[key] = (binding, mask)
        options = None if self._captures is None else self._captures.run_options(binding)
        run_bound(self._sessions.decode, binding, options)
        cache.commit(binding)

    def forget(self) -> None:
        """Before the cache's buffers become others."""
        self._bindings.clear()
        self._masks.clear()
        if self._captures is not None:
            self._captures.release()

    def resize(self, rows: int) -> None:
        """Before the batch gets so many rows; `tokens` are to be set anew."""
        self.forget()
        self._place(rows)

    def _place(self, rows: int) -> None:
        self._rows = rows
        self.tokens = placed(np.zeros((rows, 1), dtype=np.int64), self._device)
        self._logits: ort.OrtValue | None = None

    def _bind(self, output: str, cache: KVCache) -> ort.IOBinding:
        """Everything that stays from step to step: all but the mask."""
        binding = self._sessions.decode.io_binding()
        # Read first, written last: one buffer carries a greedy step's token to the next.
        put_out = self.tokens
        if output == io_spec.LOGITS:
            if self._logits is None:
                # A replayed step copies nothing: its logits stay where it computes them until they are read.
                device = HOST if self._captures is None else self._device
                zeros = np.zeros((self._rows, 1, self._sessions.vocab_size), dtype=np.float32)
                self._logits = placed(zeros, device)
            put_out = self._logits
        bind_rows(binding.bind_ortvalue_input, io_spec.INPUT_IDS, self.tokens, cache.running)
        bind_rows(binding.bind_ortvalue_output, output, put_out, cache.running)
        cache.bind(binding)
        return binding

    def _upload_mask(self, key: tuple[str, int], binding: ort.IOBinding, mask: Ids) -> None:
        """Into the buffer that is bound, as a recorded step reads it there; a new one for another shape.

        All of it, though one column has changed: an `OrtValue` has no view of a part, and a graph that makes
        the mask on the device would be launched at each step.
        """
        held = self._masks.get(key)
        if held is not None and tuple(held.shape()) == mask.shape and key in self._bindings:
            held.update_inplace(mask)
            return
        self._masks[key] = placed(mask, self._device)
        binding.bind_ortvalue_input(io_spec.ATTENTION_MASK, self._masks[key])
