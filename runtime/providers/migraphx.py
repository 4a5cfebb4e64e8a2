"""AMD's GPUs through MIGraphX and ROCm."""

from __future__ import annotations

import ctypes

from onnxlm.runtime.providers import Provider

_LIBRARIES = ("libamdhip64.so.7", "libmigraphx_c.so.3")


def _missing() -> str | None:
    """The wheel lists the provider on machines without ROCm too."""
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            return f"the ROCm library {name} cannot be loaded"
    return None


PROVIDER = Provider(
    ort_name="MIGraphXExecutionProvider",
    wheel="onnxruntime-migraphx",
    needs="with ROCm 7 and MIGraphX",
    systems=("linux",),
    precisions=("fp32", "fp16"),
    lowerings=("plain", "portable"),
    accepts=("device_id",),
    options=lambda request: {"device_id": str(request.device_id)},
    missing=_missing,
)
