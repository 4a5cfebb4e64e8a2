"""The embedded probe is the model that it says it is, and it tells a saturating CPU from an exact one."""

import numpy as np
import onnx
import onnx.helper as h
import pytest
from onnx import TensorProto as T

from onnxlm.runtime import saturation


def test_probe_is_one_integer_product():
    weight = onnx.numpy_helper.from_array(np.full((4, 1), 127, np.int8), "w")
    graph = h.make_graph(
        [h.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "saturation",
        [h.make_tensor_value_info("x", T.UINT8, [1, 4])],
        [h.make_tensor_value_info("y", T.INT32, [1, 1])],
        [weight],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 10)], ir_version=8)
    assert onnx.load_from_string(saturation.PROBE) == model


@pytest.mark.parametrize(("answer", "saturates"), [(129_540, False), (65_534, True)])
def test_answer_decides(monkeypatch, answer, saturates):
    class Fake:
        def __init__(self, *args, **kwargs):
            pass

        def run(self, names, feeds):
            return [np.array([[answer]], np.int32)]

    monkeypatch.setattr(saturation.ort, "InferenceSession", Fake)
    saturation.products_saturate.cache_clear()
    assert saturation.products_saturate() is saturates
    saturation.products_saturate.cache_clear()
