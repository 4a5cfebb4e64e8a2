"""Tracing and the pass pipeline on every family's tiny model: names, axes, weights, counts."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from support.exported import eager, exported, variants
from support.exported import traced as trace_once
from support.matrix import REPRESENTATIVES, tiny_exports
from support.onnx_text import structure

from onnxlm.errors import ExportError
from onnxlm.export import passes
from onnxlm.export.lowerings import find_lowering
from onnxlm.export.passes import find_pass, pass_names, run_passes
from onnxlm.export.pipeline import build_graphs
from onnxlm.export.tracing import trace
from onnxlm.models.config import ConfigReader
from onnxlm.models.registry import find_architecture

EVERY = pytest.mark.parametrize("key", tiny_exports())


def traced(family: str, lowering: str) -> ir.Model:
    """A fresh copy of the tiny model's traced program."""
    return trace_once(family, "tiny", lowering)


@EVERY
def test_every_weight_has_its_parameters_name_and_value(key: tuple[str, str]) -> None:
    family, lowering = key
    graph = traced(family, lowering).graph
    state = dict(eager(family).named_parameters()) | dict(eager(family).named_buffers())
    assert set(graph.initializers) <= set(state)
    assert {name for name, _ in eager(family).named_parameters()} <= set(graph.initializers)
    for name, value in graph.initializers.items():
        assert value.const_value is not None
        assert torch.equal(torch.from_numpy(value.const_value.numpy()), state[name].detach())


@EVERY
def test_weights_are_not_copied(key: tuple[str, str]) -> None:
    """A traced program refers to the model's own memory: export needs no second copy."""
    family, lowering = key
    addresses = {parameter.data_ptr() for parameter in eager(family).parameters()}
    for name, _ in eager(family).named_parameters():
        tensor = traced(family, lowering).graph.initializers[name].const_value
        assert tensor is not None
        assert tensor.raw.data_ptr() in addresses


@EVERY
def test_axes_of_the_traced_program(key: tuple[str, str]) -> None:
    family, lowering = key
    graph = traced(family, lowering).graph
    vocab = eager(family).lm_head.weight.shape[0]
    parts = {
        f"{i}.{part}": shape
        for i, kept in enumerate(eager(family).state_shapes)
        for part, shape in kept.items()
    }

    def states(axis: str, windowed: str) -> dict[str, tuple[object, ...]]:
        windows = eager(family).windows
        return {
            part: ("batch_size", heads, windowed if windows[int(part[0])] else axis, width)
            for part, (heads, width) in parts.items()
        }

    cache = states("past_sequence_length", "window_past_length")
    grown = states("total_sequence_length", "window_total_length")
    assert shapes(graph.inputs) == {
        "input_ids": ("batch_size", "sequence_length"),
        "attention_mask": ("batch_size", "total_sequence_length"),
        **{f"past_key_values.{part}": shape for part, shape in cache.items()},
    }
    assert shapes(graph.outputs) == {
        "logits": ("batch_size", "sequence_length", vocab),
        **{f"present.{part}": shape for part, shape in grown.items()},
    }


def shapes(values: list[ir.Value]) -> dict[str | None, tuple[int | str, ...]]:
    return {
        value.name: tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape or ())
        for value in values
    }


@EVERY
@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_no_axis_is_called_otherwise(key: tuple[str, str], graph: str) -> None:
    """In inner values too: a sample's size or a tracer's symbol anywhere is a frozen axis in the making."""
    family, lowering = key
    promised = {
        *("batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"),
        *(
            "window_past_length",
            "window_total_length",
            "evicted_rows",
            "evicted_given",
            "num_logits_to_keep",
        ),
    }
    built = exported(family, "tiny", lowering).graphs[graph].model.graph
    values = [*built.inputs, *built.outputs, *(v for node in built for v in node.outputs)]
    symbols = {
        str(dim)
        for value in values
        for dim in value.shape or ()
        if not isinstance(dim, int) and dim.value is not None
    }
    assert symbols <= promised


@EVERY
def test_second_run_changes_nothing(key: tuple[str, str]) -> None:
    family, lowering = key
    fused = traced(family, lowering)
    run_passes(fused, ("clean", *find_lowering(lowering).passes))
    for name in pass_names():
        model = fused.clone()
        find_pass(name)(model)
        once = structure(model)
        assert find_pass(name)(model) == 0, name
        assert structure(model) == once, name


def test_every_pass_fires_somewhere_and_has_a_test() -> None:
    missing = set(pass_names())
    others = (("llama", "plain"), ("llama", "portable"))
    for family, lowering in (*others, *((name, "ort") for name in REPRESENTATIVES)):
        for graph in exported(family, "tiny", lowering).graphs.values():
            missing -= {name for name, count in graph.fusions.items() if count}
    assert missing == set()
    tests = Path(__file__).parent
    assert [n for n in pass_names() if not (tests / f"test_pass_{n}.py").is_file()] == []


def test_pass_names_are_the_files_with_a_rule() -> None:
    files = {file.stem for file in Path(passes.__file__).parent.glob("*.py")}
    assert set(pass_names()) == {name for name in files if not name.startswith("_")}


def test_failing_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: ir.Model) -> int:
        raise ValueError("no such axis")

    monkeypatch.setattr("onnxlm.export.passes.silu.apply", fail)
    with pytest.raises(RuntimeError, match=r"pass silu failed after \['clean'\]: no such axis"):
        run_passes(traced("llama", "ort"), ("clean", "silu", "skip_norm"))


LLAMA_LAYERS = 2
LLAMA_COUNTS = {
    "torch_layout": 7 * LLAMA_LAYERS + 1,
    "silu": LLAMA_LAYERS,
    "packed_qkv": LLAMA_LAYERS,
    "merged_gate_up": LLAMA_LAYERS,
    "skip_norm": 2 * LLAMA_LAYERS,
    "greedy_head": 1,
}


@pytest.mark.parametrize("variant", variants("llama"))
def test_fusions_of_each_llama_layer(variant: str) -> None:
    counts = dict(LLAMA_COUNTS)
    if "narrow" in variant:  # rotation stands between the products and attention
        counts["packed_qkv"] = 0
    graphs = exported("llama", variant, "ort").graphs
    assert graphs["prefill"].fusions.items() >= {**counts, "last_logits": 1}.items()
    assert graphs["decode"].fusions.items() >= {**counts, "decode_step": LLAMA_LAYERS}.items()
    assert "last_logits" not in graphs["decode"].fusions


def test_operators_of_a_llama_decode_step() -> None:
    """Five products, one attention, two norms a layer: what a step costs beyond its weights is operators."""
    graph = exported("llama", "tiny", "ort").graphs["decode"].model.graph
    operators = [node.op_type for node in graph]
    in_a_layer = {
        "FusedMatMul": 4,  # qkv, o, gate and up, down
        "GroupQueryAttention": 1,
        "SkipSimplifiedLayerNormalization": 2,
        "Split": 1,
        "QuickGelu": 1,
        "Mul": 1,
    }
    outside = {
        "FusedMatMul": 1,
        "Gather": 1,
        "RMSNormalization": 1,
        "ArgMax": 1,
        # Lengths of the rows and the number of columns, as attention wants them.
        **{"ReduceSum": 1, "Sub": 1, "Cast": 2, "Shape": 1, "Squeeze": 1},
    }
    for name in set(operators):
        expected = in_a_layer.get(name, 0) * LLAMA_LAYERS + outside.get(name, 0)
        assert operators.count(name) == expected, name


def test_head_width_that_attention_refuses_is_named() -> None:
    architecture = find_architecture("llama")
    config = architecture.tiny | {"head_dim": 20}
    model = architecture.build(architecture.parse_config(ConfigReader(config, "config.json")))
    with pytest.raises(
        ExportError, match=r"head_dim .* found 20; allowed: multiples of 8; use --lowering portable"
    ):
        trace(model.eval(), find_lowering("ort"))


def test_unknown_lowering_is_named() -> None:
    with pytest.raises(ExportError, match="found 'tensorrt'; allowed: ort, plain, portable"):
        find_lowering("tensorrt")


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = eager("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lowering = find_lowering("ort")
    build_graphs(trace(model, lowering), lowering)
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
