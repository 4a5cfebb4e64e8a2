"""Arm and x86 CPUs through XNNPACK."""

from onnxlm.runtime.providers import Provider

PROVIDER = Provider(
    ort_name="XnnpackExecutionProvider",
    needs="build ONNX Runtime with --use_xnnpack: no wheel has it",
    precisions=("fp32",),
    lowerings=("plain",),
)
