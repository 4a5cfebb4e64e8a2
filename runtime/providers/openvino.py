"""Intel's CPUs, GPUs and NPUs through OpenVINO."""

from onnxlm.runtime.providers import Provider

PROVIDER = Provider(
    ort_name="OpenVINOExecutionProvider",
    install=(
        "pip uninstall -y onnxruntime && pip install onnxruntime-openvino "
        "(one import name, two wheels)"
    ),
    systems=("linux", "win32"),
)
