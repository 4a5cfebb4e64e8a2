"""NVIDIA GPUs through CUDA and cuDNN."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys

from onnxlm.runtime.providers import Provider


def _missing() -> str | None:
    """The wheel lists the provider on machines without a driver too: ask for the driver itself."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(name)
    except OSError:
        return f"the NVIDIA driver library {name} cannot be loaded"
    return None


PROVIDER = Provider(
    ort_name="CUDAExecutionProvider",
    install=(
        "pip uninstall -y onnxruntime && pip install onnxruntime-gpu (one import name, two wheels), "
        "with an NVIDIA driver"
    ),
    device="cuda",
    systems=("linux", "win32"),
    options=lambda device_id: {"device_id": str(device_id)},
    missing=_missing,
)
