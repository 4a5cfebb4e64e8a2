"""GPUs of any maker on Windows through DirectX 12."""

from onnxlm.runtime.providers import Provider

PROVIDER = Provider(
    ort_name="DmlExecutionProvider",
    install=(
        "on Windows: pip uninstall -y onnxruntime && pip install onnxruntime-directml "
        "(one import name, two wheels)"
    ),
    systems=("win32",),
    options=lambda device_id: {"device_id": str(device_id)},
)
