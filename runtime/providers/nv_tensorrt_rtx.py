"""NVIDIA's RTX GPUs through TensorRT for RTX, which comes with its plugin."""

from __future__ import annotations

from onnxlm.runtime.providers import DeviceRequest, Provider
from onnxlm.runtime.providers._plugin import Plugin


def _options(request: DeviceRequest) -> dict[str, str]:
    if not request.memory_limit:
        return {}
    return {"nv_max_workspace_size": str(request.memory_limit)}


PROVIDER = Provider(
    ort_name="NvTensorRTRTXExecutionProvider",
    plugin=Plugin("onnxruntime_ep_nv_tensorrt_rtx", "onnxruntime-ep-nv-tensorrt-rtx"),
    needs="with an RTX GPU and its driver",
    systems=("linux", "win32"),
    precisions=("fp32", "fp16"),
    lowerings=("portable", "plain"),
    accepts=("device_id", "memory_limit"),
    options=_options,
)
