"""How many conversations begin, run once: caches that hold a prompt's first tokens, and copies of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from onnxlm.runtime.engine import Batch
from onnxlm.runtime.sessions import Sessions

# Each entry holds keys and values of its tokens for as long as the model is open.
ENTRIES = 4


class PrefixCache:
    """Batches of one row by the tokens that they hold; the one that was not asked for longest goes first.

    Args:
        sessions: What runs the tokens.
        entries: Most batches at once.
    """

    def __init__(self, sessions: Sessions, entries: int = ENTRIES) -> None:
        self._sessions = sessions
        self._entries = entries
        self._held: OrderedDict[tuple[int, ...], Batch] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, ids: Sequence[int]) -> Batch:
        """A batch of one row that holds `ids`, for the caller alone.

        Raises:
            InputError: An id is out of bounds, or there are more than the context holds.
        """
        key = tuple(ids)
        with self._lock:  # who asks for the same tokens meanwhile waits, and copies
            batch = self._held.pop(key, None)
            if batch is None:
                batch = Batch(self._sessions, 1)
                if key:
                    batch.prefill_tokens([key])
            self._held[key] = batch
            if len(self._held) > self._entries:
                self._held.popitem(last=False)
            return batch.fork()
