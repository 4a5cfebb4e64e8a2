"""NVIDIA GPUs through TensorRT; CUDA takes the nodes that TensorRT leaves."""

from __future__ import annotations

from onnxlm.runtime.providers import DeviceRequest, Provider, _nvidia


def _options(request: DeviceRequest) -> dict[str, str]:
    options = {"device_id": str(request.device_id)}
    if request.memory_limit:
        options["trt_max_workspace_size"] = str(request.memory_limit)
    return options


PROVIDER = Provider(
    ort_name="TensorrtExecutionProvider",
    wheel="onnxruntime-gpu",
    needs="with an NVIDIA driver, CUDA, cuDNN and TensorRT 10",
    device="cuda",
    systems=("linux", "win32"),
    precisions=("fp32", "fp16"),
    # Not ort: GroupQueryAttention is no operator of TensorRT, so that every layer would go back to CUDA.
    lowerings=("portable", "plain"),
    accepts=("device_id", "memory_limit"),
    backed_by=("cuda",),
    options=_options,
    device_used=_nvidia.used_bytes,
    device_count=_nvidia.devices,
    missing=lambda: _nvidia.missing("tensorrt"),
)
