"""Intel's CPUs, GPUs and NPUs through OpenVINO; the wheel runs on CPUs of AMD too, the plugin does not."""

from __future__ import annotations

import json

from onnxlm.runtime.providers import DeviceRequest, Provider
from onnxlm.runtime.providers._plugin import Plugin


def _options(request: DeviceRequest) -> dict[str, str]:
    # Where the CPU has bfloat16, OpenVINO computes fp32 graphs in it.
    exact = {"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}
    return {"load_config": json.dumps(exact)}


PROVIDER = Provider(
    ort_name="OpenVINOExecutionProvider",
    wheel="onnxruntime-openvino",
    plugin=Plugin("onnxruntime_ep_openvino", "onnxruntime-ep-openvino"),
    systems=("linux", "win32"),
    precisions=("fp32", "fp16"),
    # The 1.24 wheel knows neither Attention nor RMSNormalization of opset 23, nor GroupQueryAttention's
    # last input.
    lowerings=("plain",),
    options=_options,
)
