"""The CPU, in every onnxruntime wheel."""

from onnxlm.runtime.providers import Provider

PROVIDER = Provider(
    ort_name="CPUExecutionProvider",
    wheel="onnxruntime",
    # DynamicQuantizeMatMul and MatMulIntegerToFloat are operators of the CPU.
    prefill_rows=True,
)
