"""Recorded decode steps: a device records the kernels of one step, then replays them as one launch.

A record holds the addresses of what was bound, so it is good for one binding, whose buffers must stay. ONNX
Runtime keeps records by a number that each run names.

Source: onnxruntime.ai, CUDA execution provider, "Using CUDA Graphs".
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import onnxruntime as ort

_NUMBER = "gpu_graph_id"
# One numbering for all batches: they share the session. 0 is what a run without a number means.
_numbers: Iterator[int] = itertools.count(1)


class Captures:
    """The records of one batch.

    Args:
        session: The decode session; opened with `graph_capture`.
    """

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._numbers: dict[int, int] = {}
        weakref.finalize(self, _release, session, self._numbers)

    def run_options(self, binding: ort.IOBinding) -> ort.RunOptions:
        """Options of a run of this binding: the first ones record it, later ones replay the record."""
        number = self._numbers.get(id(binding))
        if number is None:
            number = self._numbers[id(binding)] = next(_numbers)
        options = ort.RunOptions()
        options.add_run_config_entry(_NUMBER, str(number))
        return options

    def release(self) -> None:
        """Forget all records: their buffers go."""
        _release(self._session, self._numbers)


def _release(session: ort.InferenceSession, numbers: dict[int, int]) -> None:
    for number in numbers.values():
        session.release_captured_graph(number)
    numbers.clear()
