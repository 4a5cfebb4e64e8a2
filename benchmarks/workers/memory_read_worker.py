"""Worker that only reads memory: a step is one pass over a buffer. Arguments: - THREADS."""

from __future__ import annotations

import numpy as np
from protocol import serve

from onnxlm.runtime.roofline import MemoryReader


class ReadOnly:
    """What no decode step can beat, byte for byte."""

    def __init__(self, threads: int) -> None:
        self._reader = MemoryReader(threads)
        self.bytes = self._reader.nbytes
        self.version = f"numpy {np.__version__}"

    def prefill(self, ids: list[int], new_tokens: int) -> None:
        """One pass: the clock of a prompt means nothing here."""
        self._reader.read()

    def step(self) -> None:
        """One pass."""
        self._reader.read()

    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """There are no logits."""
        raise NotImplementedError("memory has no logits")


serve(lambda arguments: ReadOnly(int(arguments[1])))
