"""GPUs of any maker on Windows through DirectX 12."""

from onnxlm.runtime.providers import Provider

PROVIDER = Provider(
    ort_name="DmlExecutionProvider",
    wheel="onnxruntime-directml",
    systems=("win32",),
    precisions=("fp32", "fp16"),
    lowerings=("plain",),
    accepts=("device_id",),
    options=lambda request: {"device_id": str(request.device_id)},
)
