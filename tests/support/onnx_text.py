"""Small graphs written by hand, and what holds for every graph pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from parity.tolerances import tolerance

from onnxlm.export.passes import find_pass

Array = NDArray[Any]
_TYPES = {"float32": "float", "float16": "float16", "int64": "int64", "int32": "int32"}


def graph(inputs: str, outputs: str, body: str, weights: Mapping[str, Array]) -> ir.Model:
    """A model in ONNX's text form.

    Args:
        inputs: As in "float[B,S,8] x, int64[B] n".
        outputs: Likewise.
        body: The nodes.
        weights: Initializers by name, which may hold dots.
    """
    # The text form has no dots in names; parameters do.
    spelled = {name.replace(".", "__"): name for name in sorted(weights, key=len, reverse=True)}
    declared = [
        f"{_TYPES[weights[name].dtype.name]}[{','.join(map(str, weights[name].shape))}] {spelling}"
        for spelling, name in spelled.items()
    ]
    for spelling, name in spelled.items():
        body = body.replace(name, spelling)
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>\n'
        f"g ({', '.join([*filter(None, [inputs]), *declared])}) => ({outputs}) {{\n{body}\n}}"
    )
    for value in [value for value in model.graph.inputs if value.name in spelled]:
        model.graph.inputs.remove(value)
        value.name = spelled[value.name or ""]
        value.const_value = ir.tensor(weights[value.name], name=value.name)
        model.graph.register_initializer(value)
    return model


def run(model: ir.Model, feeds: Mapping[str, Array], optimized: bool = False) -> dict[str, Array]:
    """Check a model and run it with ONNX Runtime; outputs by name."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def structure(model: ir.Model) -> list[object]:
    """Everything of a graph but the bytes of its weights, to compare."""
    graph = model.graph
    nodes: list[object] = [
        (
            node.domain,
            node.op_type,
            [None if value is None else value.name for value in node.inputs],
            [value.name for value in node.outputs],
            sorted(str(attribute) for attribute in node.attributes.values()),
        )
        for node in graph
    ]
    ends = [[(v.name, str(v.shape)) for v in values] for values in (graph.inputs, graph.outputs)]
    return [*nodes, *ends, sorted(graph.initializers)]


def operators(model: ir.Model) -> list[str]:
    """Operator names in graph order."""
    return [node.op_type for node in model.graph]


def random(*shape: int, seed: int = 0) -> Array:
    """Standard normal float32 values."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def assert_fires(name: str, model: ir.Model, feeds: Mapping[str, Array], times: int = 1) -> None:
    """The pass fires so often, changes no number, and finds nothing the second time."""
    expected = run(model, feeds)
    assert find_pass(name)(model) == times
    for optimized in (False, True):
        actual = run(model, feeds, optimized)
        assert actual.keys() == expected.keys()
        for output, value in expected.items():
            assert actual[output].shape == value.shape
            allowed = tolerance("pass", "float32") * max(1.0, np.abs(value).max())
            assert np.abs(actual[output] - value).max() <= allowed
    once = structure(model)
    assert find_pass(name)(model) == 0
    assert structure(model) == once


def assert_leaves_alone(name: str, model: ir.Model, feeds: Mapping[str, Array]) -> None:
    """The pass finds nothing in a graph that runs."""
    before = structure(model)
    run(model, feeds)
    assert find_pass(name)(model) == 0
    assert structure(model) == before
