"""Where nodes run: real sessions on the CPU against the graph's own nodes, and events like those of a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx_ir as ir
import pytest
from support.runtime_models import hot_package

from onnxlm.errors import ProviderError
from onnxlm.runtime.placement import Placement, count_kernels, package_placement
from onnxlm.runtime.session import SessionConfig

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


@pytest.mark.parametrize("lowering", ["ort", "portable", "plain"])
def test_attention_and_products_of_a_package_on_the_cpu(lowering: str) -> None:
    """What the optimizer neither makes nor takes away is counted as the file has it."""
    package = hot_package(lowering)
    found = package_placement(package, SessionConfig(threads=1))
    assert set(found) == {"prefill", "decode"}
    for name, placement in found.items():
        graph = ir.load(package.graph_path(name)).graph
        operators = Counter(node.op_type for node in graph)
        assert placement.nodes is not None
        assert set(placement.nodes) == set(placement.kernels) == {CPU}
        assert placement.copies == {}
        for operator in ("GroupQueryAttention", "Attention", "Softmax", "ArgMax"):
            assert placement.nodes[CPU].get(operator, 0) == operators[operator]
            assert placement.kernels[CPU].get(operator, 0) == operators[operator]


def event(operator: str, provider: str, name: str = "n_kernel_time") -> dict[str, Any]:
    return {"cat": "Node", "name": name, "args": {"op_name": operator, "provider": provider}}


def test_copies_are_no_kernels() -> None:
    events = [
        {"cat": "Session", "name": "model_run", "args": {}},
        event("MatMul", CUDA),
        event("MatMul", CUDA),
        event("MatMul", CUDA, "n_fence_before"),
        event("MemcpyToHost", CUDA),
        event("MemcpyToHost", CUDA),
        event("MemcpyFromHost", CUDA),
        event("Shape", CPU),
    ]
    kernels, copies = count_kernels(events)
    assert kernels == {CUDA: {"MatMul": 2}, CPU: {"Shape": 1}}
    assert copies == {"MemcpyToHost": 2, "MemcpyFromHost": 1}


def test_summary() -> None:
    kernels = {CUDA: {"MatMul": 2}, CPU: {"Shape": 1, "Gather": 2}}
    mixed = Placement(None, kernels, {"MemcpyToHost": 2})
    assert mixed.summary() == (
        f"{CUDA} 2 kernels, {CPU} 3 kernels; copies between devices: 2 MemcpyToHost"
    )
    told = Placement({CUDA: {"MatMul": 7}}, kernels, {})
    assert told.summary() == f"{CUDA} 7 nodes; copies between devices: none"


def test_a_package_that_the_provider_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxlm.runtime.opening.usable_provider", lambda config: "openvino")
    with pytest.raises(ProviderError, match="does not run packages of this lowering; found ort"):
        package_placement(hot_package(), SessionConfig(provider="openvino"))


class Failing:
    """A session whose provider can load a graph and cannot run it; it notes that its profile was closed."""

    def __init__(self) -> None:
        self.ended = 0

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def run(self, outputs: None, feeds: object) -> None:
        raise RuntimeError("Non-zero status code returned while running MatMul")

    def end_profiling(self) -> str:
        self.ended += 1
        return "events.json"


def test_a_provider_that_fails_on_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Failing()
    monkeypatch.setattr("onnxlm.runtime.placement.open_session", lambda *arguments: session)
    message = (
        f"^{CUDA} could load the graph and fails to run it; found Non-zero status code returned while "
        "running MatMul; try another provider$"
    )
    with pytest.raises(ProviderError, match=message):
        package_placement(hot_package(), SessionConfig())
    assert session.ended == 1
