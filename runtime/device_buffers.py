"""Cache buffers that get more or fewer columns or other rows, each change made where the buffer is.

In the processor's memory numpy does it. A device's memory is not looked at from here: a graph of two
operators does it there, run by the provider that the device belongs to, and nothing passes the processor.
"""

from __future__ import annotations

import base64
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm.errors import ProviderError
from onnxlm.runtime.providers import DeviceRequest, find_provider
from onnxlm.runtime.session import memory_error, run_bound


@dataclass(frozen=True)
class Device:
    """Where buffers are.

    Attributes:
        kind: What ONNX Runtime calls it ("cpu", "cuda").
        number: Which of its kind.
        memory_limit: Bytes that each arena of ONNX Runtime may take there; 0 is no limit.
    """

    kind: str = "cpu"
    number: int = 0
    memory_limit: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """As ONNX Runtime is told."""
        return self.kind, self.number


HOST = Device()

# y = Pad(Gather(x, r, axis=0), p), opset 18, as serialized models by x's type; tests build them with onnx.
MOVERS = {
    "tensor(float)": (
        "CAg6YgoeCgF4CgFyEgFnIgZHYXRoZXIqCwoEYXhpcxgAoAECCg4KAWcKAXASAXkiA1BhZBIEbW92ZVoJCgF4EgQKAggBWgkK"
        "AXISBAoCCAdaCQoBcBIECgIIB2IJCgF5EgQKAggBQgQKABAS"
    ),
    "tensor(float16)": (
        "CAg6YgoeCgF4CgFyEgFnIgZHYXRoZXIqCwoEYXhpcxgAoAECCg4KAWcKAXASAXkiA1BhZBIEbW92ZVoJCgF4EgQKAggKWgkK"
        "AXISBAoCCAdaCQoBcBIECgIIB2IJCgF5EgQKAggKQgQKABAS"
    ),
}
_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


def on_host(device: Device) -> bool:
    """Whether buffers there are the processor's own memory."""
    return device.kind == "cpu"


def placed(array: NDArray[Any], device: Device) -> ort.OrtValue:
    """An array as a value: itself on the host, a copy on a device.

    Raises:
        ProviderError: The device has no room for it, or fails otherwise.
    """
    if on_host(device):
        return ort.OrtValue.ortvalue_from_numpy(array)
    try:
        return ort.OrtValue.ortvalue_from_numpy(array, *device.place)
    except Exception as error:  # onnxruntime raises its own classes
        provider = find_provider(device.kind)
        raise memory_error(provider, error) or ProviderError(
            f"{provider.ort_name} could load the graphs and cannot make a buffer on device {device.number}",
            found=str(error),
            fix="try another provider",
        ) from error


def resized(
    buffer: ort.OrtValue, axis: int, kept: int, size: int, device: Device, skipped: int = 0
) -> ort.OrtValue:
    """A new buffer that begins with what another holds; the rest is zero.

    Zeros, not empty memory: a kernel that multiplies an unused tail by 0 must not meet a NaN.

    Args:
        buffer: The other.
        axis: The axis whose length changes.
        kept: Entries along it that are taken over.
        size: Entries along it of the new buffer.
        device: Where both are.
        skipped: Entries before those that are taken over.
    """
    shape = [*buffer.shape()]
    shape[axis] = size
    if on_host(device):
        held = buffer.numpy()
        new = np.zeros(shape, dtype=held.dtype)
        before = tuple(slice(None) for _ in range(axis))
        new[*before, slice(kept)] = held[*before, slice(skipped, skipped + kept)]
        return ort.OrtValue.ortvalue_from_numpy(new)
    if not kept:
        return placed(np.zeros(shape, dtype=_DTYPES[buffer.data_type()]), device)
    rows = np.arange(shape[0])
    # Twice, as a pad cuts off or adds: what follows the kept entries is dropped, then zeros come.
    if kept != buffer.shape()[axis]:
        behind = kept + skipped - buffer.shape()[axis]
        buffer = _moved(buffer, rows, axis, (-skipped, behind), device)
    return _moved(buffer, rows, axis, (0, size - kept), device)


def taken(buffer: ort.OrtValue, rows: NDArray[np.int64], device: Device) -> ort.OrtValue:
    """A new buffer whose row i, along the first axis, is row `rows[i]` of another; both are on a device."""
    return _moved(buffer, rows, 0, (0, 0), device)


def _moved(
    buffer: ort.OrtValue,
    rows: NDArray[np.int64],
    axis: int,
    more: tuple[int, int],
    device: Device,
) -> ort.OrtValue:
    """The rows, with more entries along an axis before and behind them, or fewer."""
    pads = np.zeros((2, len(buffer.shape())), dtype=np.int64)
    pads[:, axis] = more
    session = _mover(buffer.data_type(), device)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", buffer)
    binding.bind_cpu_input("r", np.ascontiguousarray(rows, dtype=np.int64))
    binding.bind_cpu_input("p", pads.ravel())
    binding.bind_output("y", *device.place)
    run_bound(session, binding)
    return binding.get_outputs()[0]


@functools.cache
def _mover(data_type: str, device: Device) -> ort.InferenceSession:
    """A session on the device, kept: it owns the memory that it gave out."""
    provider = find_provider(device.kind)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    request = DeviceRequest(device.number, device.memory_limit)
    chosen = (provider.ort_name, dict(provider.options(request)))
    model = base64.b64decode(MOVERS[data_type])
    return ort.InferenceSession(model, options, providers=[chosen], enable_fallback=0)
