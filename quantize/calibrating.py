"""Runs a full-precision package over a text and shows what its linear layers read.

ONNX Runtime runs the prefill graph with the inputs of its linears as further outputs; torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.graphs.edit import drop_unused
from onnxlm.io_spec import StateSpec
from onnxlm.progress import Progress

_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
_ERRORS_ONLY = 3

# Called with a value's name and the value, float32 [tokens, K].
Observer = Callable[[str, NDArray[np.float32]], None]


def observe(
    model: ir.Model,
    folder: Path,
    names: Sequence[str],
    windows: Sequence[Sequence[int]],
    states: Sequence[StateSpec],
    observer: Observer,
    progress: Progress,
) -> None:
    """Run every window of tokens by itself and hand the named values to the observer.

    Args:
        model: The prefill graph; not changed.
        folder: Where its external data lies.
        names: Values [batch, tokens, K] to observe.
        windows: Token ids of each window.
        states: The graph's caches; every window starts with empty ones.
        observer: Receives the values.
        progress: Told of the windows done.
    """
    session = _session(model, folder, names)
    empty = {state.past: np.zeros(state.sized(1, 0), dtype=state.dtype) for state in states}
    for done, window in enumerate(windows):
        progress("calibrate", done, len(windows))
        ids = np.array([window], dtype=np.int64)
        feeds = {
            io_spec.INPUT_IDS: ids,
            io_spec.ATTENTION_MASK: np.ones_like(ids),
            **empty,
        }
        # What makes the values may not need every input: the caches of later layers are cut off.
        feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
        for name, values in zip(names, session.run(names, feeds), strict=True):
            observer(name, values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False))
    progress("calibrate", len(windows), len(windows))


def _session(model: ir.Model, folder: Path, names: Sequence[str]) -> ort.InferenceSession:
    """The part of a graph that makes the named values: no head, no caches."""
    watched = model.clone()
    values = {value.name: value for node in watched.graph for value in node.outputs}
    watched.graph.outputs.clear()
    for name in names:
        value = values[name]
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        watched.graph.outputs.append(value)
    drop_unused(watched)
    for value in [value for value in watched.graph.inputs if not value.uses()]:
        watched.graph.inputs.remove(value)
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.add_session_config_entry(_FOLDER_KEY, str(folder))
    # A few long runs: weights are read from the mapped file, not packed into a second copy.
    options.add_session_config_entry("session.disable_prepacking", "1")
    data = ir.to_proto(watched).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
