"""The rate at which threads read memory: what bounds a decode step, which reads every weight once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

# Several times any cache, so that every pass comes from memory.
BUFFER_BYTES = 256 << 20


class MemoryReader:
    """A buffer and the threads that read it.

    Args:
        threads: How many read at once.
        nbytes: Size of the buffer.
    """

    def __init__(self, threads: int, nbytes: int = BUFFER_BYTES) -> None:
        # Ones: pages that were never written are all the same page of zeros.
        values = np.ones(nbytes // 8, dtype=np.int64)
        self.nbytes = values.nbytes
        self._parts = np.array_split(values, threads)
        self._pool = ThreadPoolExecutor(threads)

    def read(self) -> float:
        """Read all of it once; seconds."""
        start = time.perf_counter()
        # numpy lets go of Python's lock while it looks for the largest, which takes less time than to load.
        list(self._pool.map(np.max, self._parts))
        return time.perf_counter() - start


def read_bytes_per_s(threads: int, passes: int = 8) -> float:
    """The best rate of some passes: what disturbs one only makes it slower."""
    reader = MemoryReader(threads)
    return reader.nbytes / min(reader.read() for _ in range(passes))
