"""latent_cache: the second present of a cache that is key and value at once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from support.onnx_text import graph, random

from onnxlm.export.passes import find_pass

ROWS, NEW, PAST, HEADS, WIDTH = 2, 1, 4, 3, 8
BODY = """
y, present, spare = com.microsoft.GroupQueryAttention<num_heads=3, kv_num_heads=1>
    (q, k, {value}, cache, {past}, n, t)
"""


def attention(value: str, past: str) -> ir.Model:
    inputs = (
        "float[batch,1,24] q, float[batch,1,8] k, float[batch,1,8] v, int32[batch] n, int32 t,"
        "float[batch,1,p,8] cache, float[batch,1,p,8] other"
    )
    outputs = "float[batch,1,24] y, float[batch,1,t,8] present"
    model = graph(inputs, outputs, BODY.format(value=value, past=past), {})
    # The text form has no dots in names.
    by_name = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    by_name["cache"].name = "past_key_values.0.latent"
    by_name["present"].name = "present.0.latent"
    return model


def test_the_twin_is_an_output_and_may_share_the_buffer() -> None:
    model = attention("k", "cache")
    assert find_pass("latent_cache")(model) == 1
    names = [value.name for value in model.graph.outputs]
    assert names == ["y", "present.0.latent", "present.0.latent.twin"]
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    cache = random(ROWS, 1, PAST, WIDTH)
    cache[:, :, PAST - 1] = np.nan  # where the new token goes
    query, key = random(ROWS, NEW, HEADS * WIDTH), random(ROWS, NEW, WIDTH)
    buffer = ort.OrtValue.ortvalue_from_numpy(cache)
    binding = session.io_binding()
    binding.bind_cpu_input("q", query)
    binding.bind_cpu_input("k", key)
    binding.bind_cpu_input("n", np.full(ROWS, PAST - 1, np.int32))
    binding.bind_cpu_input("t", np.array(PAST, np.int32))
    binding.bind_ortvalue_input("past_key_values.0.latent", buffer)
    binding.bind_output("y")
    for name in names[1:]:
        binding.bind_ortvalue_output(name, buffer)
    session.run_with_iobinding(binding)
    columns = np.concatenate((cache[:, 0, :-1], key), axis=1).astype(np.float64)
    scores = query.reshape(ROWS, HEADS, WIDTH) @ columns.transpose(0, 2, 1) / WIDTH**0.5
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        binding.copy_outputs_to_cpu()[0].reshape(ROWS, HEADS, WIDTH), shares @ columns, atol=1e-5
    )
    np.testing.assert_array_equal(buffer.numpy()[:, 0], columns.astype(np.float32))


@pytest.mark.parametrize(("value", "past"), [("v", "other")])
def test_two_caches_stay_two(value: str, past: str) -> None:
    model = attention(value, past)
    assert find_pass("latent_cache")(model) == 0
    assert len(model.graph.outputs) == 2
