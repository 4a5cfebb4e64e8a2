"""Apple's CPU, GPU and Neural Engine through Core ML."""

from onnxlm.runtime.providers import Provider

PROVIDER = Provider(
    ort_name="CoreMLExecutionProvider",
    wheel="onnxruntime",
    needs="whose wheel for macOS brings it",
    systems=("darwin",),
    precisions=("fp32", "fp16"),
    lowerings=("plain", "portable"),
    # The older format, the default, has fewer operators.
    options=lambda request: {"ModelFormat": "MLProgram"},
)
