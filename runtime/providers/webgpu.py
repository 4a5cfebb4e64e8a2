"""GPUs of any maker through WebGPU: Vulkan, DirectX 12 or Metal."""

from onnxlm.runtime.providers import Provider
from onnxlm.runtime.providers._plugin import Plugin

PROVIDER = Provider(
    ort_name="WebGpuExecutionProvider",
    wheel="onnxruntime-webgpu",
    plugin=Plugin("onnxruntime_ep_webgpu", "onnxruntime-ep-webgpu"),
    needs="with a GPU and its driver",
    precisions=("fp32", "fp16"),
    # It has to refuse GroupQueryAttention with right-padded chunks (`query_seqlens`).
    lowerings=("portable", "plain"),
    # Of the plugin's list of devices; the provider that a wheel brings itself has no option for it.
    accepts=("device_id",),
)
