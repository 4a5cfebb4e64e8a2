"""Qualcomm's GPUs and NPUs through QNN."""

from onnxlm.runtime.providers import Provider
from onnxlm.runtime.providers._plugin import Plugin

PROVIDER = Provider(
    ort_name="QNNExecutionProvider",
    plugin=Plugin("onnxruntime_qnn", "onnxruntime-qnn"),
    needs="with a Snapdragon processor",
    systems=("linux", "win32"),
    precisions=("fp32", "fp16"),
    lowerings=("plain",),
    accepts=("device_id",),
)
