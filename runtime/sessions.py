"""The sessions of a package, and what their callers must know of it."""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime as ort

from onnxlm.io_spec import StateSpec
from onnxlm.runtime.device_buffers import HOST, Device


@dataclass(frozen=True)
class Sessions:
    """What a batch runs.

    Attributes:
        prefill: Session of the prefill graph.
        decode: Session of the decode graph.
        states: The package's states.
        vocab_size: V.
        context_length: Most positions of a row.
        device: Where the buffers are.
        kv_budget: Most bytes of one batch's cache; None for as much as the machine has.
        graph_capture: The decode session records a step and replays it, see `Captures`.
    """

    prefill: ort.InferenceSession
    decode: ort.InferenceSession
    states: tuple[StateSpec, ...]
    vocab_size: int
    context_length: int
    device: Device = HOST
    kv_budget: int | None = None
    graph_capture: bool = False
