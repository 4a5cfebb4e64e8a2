"""Apple's CPU, GPU and Neural Engine through Core ML."""

from onnxlm.runtime.providers import Provider

PROVIDER = Provider(
    ort_name="CoreMLExecutionProvider",
    install="on macOS: pip install onnxruntime, whose wheel for macOS brings it",
    systems=("darwin",),
    # The older format, the default, has fewer operators.
    options=lambda device_id: {"ModelFormat": "MLProgram"},
)
