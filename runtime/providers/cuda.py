"""NVIDIA GPUs through CUDA and cuDNN."""

from __future__ import annotations

from onnxlm.runtime.providers import DeviceRequest, Provider, _nvidia


def _options(request: DeviceRequest) -> dict[str, str]:
    options = {
        "device_id": str(request.device_id),
        # Caches are allocated once and grow in large steps: doubling the arena would waste half of it.
        "arena_extend_strategy": "kSameAsRequested",
        # TF32 keeps 10 bits of a number: fp32 packages are to give fp32 results.
        "use_tf32": "0",
    }
    if request.memory_limit:
        options["gpu_mem_limit"] = str(request.memory_limit)
    if request.graph_capture:
        options["enable_cuda_graph"] = "1"
    return options


PROVIDER = Provider(
    ort_name="CUDAExecutionProvider",
    wheel="onnxruntime-gpu",
    needs="with an NVIDIA driver, CUDA and cuDNN (as onnxruntime-gpu[cuda,cudnn] it brings both)",
    device="cuda",
    systems=("linux", "win32"),
    # GroupQueryAttention has kernels for 16-bit types only (ONNX Runtime, docs/OperatorKernels.md): in
    # float32 all attention would run on the CPU.
    activations={"ort": ("float16",)},
    accepts=("device_id", "memory_limit", "graph_capture"),
    options=_options,
    device_used=_nvidia.used_bytes,
    device_count=_nvidia.devices,
    missing=lambda: _nvidia.missing("cuda"),
)
