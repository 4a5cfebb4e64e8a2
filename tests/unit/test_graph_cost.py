"""Nodes read from an ONNX file, and what they must do: by hand, and against PyTorch's own parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from support.onnx_text import graph
from support.runtime_models import HOT_CONFIG, hot_oracle, hot_package, loaded

from onnxlm.errors import PackageError
from onnxlm.runtime import engine
from onnxlm.runtime.arrays import Ids
from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_package import package_work
from onnxlm.runtime.engine import PREFILL_CHUNK, Batch
from onnxlm.runtime.graph_cost import NodeCost, Work, node_costs, node_flops, work_of
from onnxlm.runtime.graph_reader import Constant, read_graph


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype=dtype)


WEIGHTS = {
    "embed.weight": zeros(10, 8),
    "layers.0.up.weight": zeros(8, 16),
    "layers.0.down.weight": zeros(16, 8, dtype="float16"),
    "norm.weight": zeros(8),
    "head": zeros(8, 10),
}
BODY = """
h = Gather(embed.weight, ids)
u = MatMul(h, layers.0.up.weight)
a = Relu(u)
w = Cast<to=1>(layers.0.down.weight)
d = MatMul(a, w)
n = Mul(d, norm.weight)
logits = MatMul(n, head)
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    model = graph("int64[B,S] ids", "float[B,S,10] logits", BODY, WEIGHTS)
    for i, node in enumerate(model.graph):
        node.name = f"{i} {node.op_type}"
    ir.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_file_is_read_as_the_onnx_package_reads_it(written: Path) -> None:
    found, expected = read_graph(written), onnx.load(written).graph
    assert [(n.name, n.op_type, list(n.inputs), list(n.outputs)) for n in found.nodes] == [
        (n.name, n.op_type, list(n.input), list(n.output)) for n in expected.node
    ]
    assert found.nodes[3].integers == {"to": 1}
    assert found.constants == {
        t.name: Constant(tuple(t.dims), onnx.numpy_helper.to_array(t).nbytes)
        for t in expected.initializer
    }


def test_costs_by_hand(written: Path) -> None:
    costs = node_costs(read_graph(written))
    assert costs == {
        "0 Gather": NodeCost("Gather", "embedding"),  # a row of the table, not the table
        "1 MatMul": NodeCost("MatMul", "layer 0", 8 * 16 * 4, 2 * 8 * 16),
        "2 Relu": NodeCost("Relu", "layer 0"),
        "3 Cast": NodeCost("Cast", "layer 0"),  # of a constant: done when the graph is loaded
        "4 MatMul": NodeCost("MatMul", "layer 0", 16 * 8 * 2, 2 * 16 * 8),
        "5 Mul": NodeCost("Mul", "head", 8 * 4),
        "6 MatMul": NodeCost("MatMul", "head", 8 * 10 * 4, 2 * 8 * 10),
    }
    # Three rows of five tokens: every product for each, the head's for the last of each row.
    assert node_flops(costs["6 MatMul"], 3, 5) == 3 * 2 * 80
    assert work_of(costs, 3, 5) == Work(512 + 256 + 32 + 320, 15 * (256 + 256) + 3 * 160)


def test_the_slower_of_reading_and_multiplying_counts() -> None:
    work = Work(bytes=1000, flops=6000)
    assert work.least_s(bytes_per_s=100, flops_per_s=1000) == 10.0
    assert work.least_s(bytes_per_s=1000, flops_per_s=1000) == 6.0


def test_a_package_reads_every_parameter_once_a_step() -> None:
    prefill, step = package_work(hot_package())(Case(100, 40, batch=3))
    tied = dict(hot_oracle().named_parameters())  # a tied table is there once
    table = tied["model.embed_tokens.weight"].numel()
    products = sum(p.numel() for p in tied.values() if p.dim() == 2)
    parameters = sum(p.numel() for p in tied.values())
    heads, width = HOT_CONFIG["num_key_value_heads"], HOT_CONFIG["head_dim"]
    cache = 3 * 120 * 2 * HOT_CONFIG["num_hidden_layers"] * heads * width * 4
    # Constants of the graph beside the parameters are a matter of bytes.
    assert 0 <= step.bytes - 4 * parameters - cache < 512
    assert step.flops == 3 * 2 * products
    assert prefill.flops == 300 * 2 * (products - table) + 3 * 2 * table
    assert 0 <= prefill.bytes - 4 * parameters < 1024


def test_a_long_prompt_reads_the_weights_once_a_call() -> None:
    work = package_work(hot_package())
    (one, _), (two, _) = work(Case(PREFILL_CHUNK, 2)), work(Case(PREFILL_CHUNK + 1, 2))
    assert two.bytes == 2 * one.bytes


@pytest.mark.parametrize(("rows", "tokens"), [(1, 600), (16, 200), (40, 130)])
def test_calls_are_as_many_as_a_batch_makes(
    monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int
) -> None:
    sizes: list[int] = []
    run = engine.run_prefill

    def counted(session: object, cache: object, ids: Ids, *more: Any) -> Any:
        sizes.append(ids.shape[1])
        return run(session, cache, ids, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "run_prefill", counted)
    Batch(loaded(hot_package().path).sessions, rows).prefill_tokens([[5] * tokens] * rows)
    assert sum(sizes) == tokens
    assert engine.prompt_calls(rows, tokens) == len(sizes)


@pytest.mark.parametrize("content", [b"\x3a\xff\x01", b"\x0f"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    with pytest.raises(PackageError, match="is no ONNX model"):
        read_graph(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="cannot be read"):
        read_graph(tmp_path / "model.onnx")
