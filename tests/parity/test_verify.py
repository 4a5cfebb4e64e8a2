"""The verifier on hot models: right packages pass, each kind of wrong one is caught and its place named."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from support.hot_packages import (
    CONFIG,
    LETTERS,
    Graphs,
    change_parameter,
    change_tensor,
    eager,
    edited,
    package,
)

from onnxlm import io_spec
from onnxlm.calls import Calls, Floats
from onnxlm.errors import ExportError, InputError
from onnxlm.export.divergence import probe_graph
from onnxlm.export.reference import EagerReference
from onnxlm.export.verify import check_parity, tokens_wanted
from onnxlm.package import Package
from onnxlm.proof import Check, Divergence
from onnxlm.runtime import load
from onnxlm.runtime.evaluate import PackageRunner
from onnxlm.runtime.session import SessionConfig

CONTEXT = CONFIG["max_position_embeddings"]
LAYERS = CONFIG["num_hidden_layers"]
IDS = np.random.default_rng(3).integers(0, len(LETTERS), tokens_wanted(CONTEXT)).tolist()
LOWERINGS = ["ort", "portable"]
PREFILL, CHUNKS, DECODE, BATCH, GREEDY = range(5)

Outcome = tuple[list[Check], Divergence | None]
Change = Callable[[NDArray[Any]], NDArray[Any]]


def runner(opened: Package) -> PackageRunner:
    config = SessionConfig(threads=1)
    return PackageRunner(load(opened.path, threads=1), config)


def verify(opened: Package, ids: Sequence[int] = IDS) -> Outcome:
    return check_parity(runner(opened), EagerReference(eager()), opened, ids)


def failed(outcome: Outcome) -> list[int]:
    return [index for index, check in enumerate(outcome[0]) if not check.ok]


def place(outcome: Outcome) -> tuple[str, str | None]:
    divergence = outcome[1]
    assert divergence is not None
    return divergence.graph, divergence.place


@functools.cache
def honest(lowering: str, precision: str) -> Outcome:
    return verify(package(lowering, precision))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_right_package_passes(lowering: str, precision: str) -> None:
    checks, divergence = honest(lowering, precision)
    assert [check.name for check in checks] == [
        "prefill of 64 tokens",
        "prefill in chunks of 5, 1 and 6",
        "decode of 32 given tokens",
        "padded batch of 5, 21 and 64, 8 steps",
        "greedy, 64 tokens",
    ]
    assert all(check.ok for check in checks)
    assert divergence is None
    assert [check.compared for check in checks] == [64, 12, 96, 27, 64]
    # Two programs were compared, not one with itself; and the bound is not reached by chance.
    assert all(0 < check.difference < check.allowed / 2 for check in checks[:GREEDY])
    assert checks[GREEDY].note.startswith("64 of 64 equal" if precision == "fp32" else "6")


def scaled(factor: float) -> Change:
    return lambda weight: weight * factor


def swap_halves(rows: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(np.split(rows, 2)[::-1])


def one_nan(weight: NDArray[Any]) -> NDArray[Any]:
    weight.flat[7] = np.nan
    return weight


WRONG_WEIGHTS = {
    "a weight of layer 1 off by 1%": ("layers.1.self_attn.o_proj.weight", scaled(1.01), "layer 1"),
    "a weight of layer 0 off by 1%": ("layers.0.mlp.down_proj.weight", scaled(1.01), "layer 0"),
    "query rows in another order": ("layers.1.self_attn.q_proj.weight", swap_halves, "layer 1"),
    "key rows in another order": ("layers.0.self_attn.k_proj.weight", swap_halves, "layer 0"),
    "a dropped query bias": ("layers.1.self_attn.q_proj.bias", scaled(0.0), "layer 1"),
    "a dropped value bias": ("layers.0.self_attn.v_proj.bias", scaled(0.0), "layer 0"),
    "a dropped bias of the MLP": ("layers.1.mlp.up_proj.bias", scaled(0.0), "layer 1"),
    "a norm off by one weight": ("layers.1.input_layernorm.weight", lambda w: w + 1, "layer 1"),
    "the final norm": ("norm.weight", scaled(1.01), "the head"),
    "the table, tied to the head": ("embed_tokens.weight", scaled(1.01), "the embedding"),
    "no number": ("layers.1.mlp.gate_proj.weight", one_nan, "layer 1"),
}


@pytest.mark.parametrize("fault", WRONG_WEIGHTS)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_wrong_weight_fails_and_its_layer_is_named(lowering: str, fault: str) -> None:
    name, change, where = WRONG_WEIGHTS[fault]
    wrong = edited(package(lowering), lambda p, graphs: change_parameter(p, graphs, name, change))
    outcome = verify(wrong)
    assert {PREFILL, CHUNKS, DECODE, BATCH} <= set(failed(outcome))
    assert place(outcome) == ("prefill", where)
    if fault == "no number":
        assert outcome[0][PREFILL].difference == np.inf


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_rope_table_of_the_wrong_sign(lowering: str, precision: str) -> None:
    wrong = edited(
        package(lowering, precision),
        lambda _, graphs: change_tensor(graphs, "rope_default_sin", np.negative),
    )
    outcome = verify(wrong)
    assert place(outcome) == ("prefill", "layer 0")
    assert outcome[1] is not None
    assert "prefill.onnx first differs behind layer 0" in str(outcome[1])
    assert list(outcome[1].differences) == ["the embedding", "layer 0", "layer 1", "the head"]
    assert outcome[1].differences["the embedding"] <= outcome[1].allowed


def test_a_position_that_only_decode_reaches() -> None:
    """Rows of the rotary table past the prompt: prefill is right, decode is not, from the first step on."""

    def far(table: NDArray[Any]) -> NDArray[Any]:
        table[64:] *= -1
        return table

    wrong = edited(package("ort"), lambda _, graphs: change_tensor(graphs, "rope_default_sin", far))
    outcome = verify(wrong)
    assert failed(outcome) == [DECODE, BATCH, GREEDY]
    assert place(outcome) == ("decode", "layer 0")


def attention_of(graphs: Graphs, graph: str, layer: int) -> ir.Node:
    kinds = ("GroupQueryAttention", "Attention")
    return [node for node in graphs[graph].graph if node.op_type in kinds][layer]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_fault_of_the_decode_graph_alone(lowering: str, layer: int) -> None:
    def edit(_: Package, graphs: Graphs) -> None:
        node = attention_of(graphs, io_spec.DECODE, layer)
        node.attributes.add(ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.1))

    outcome = verify(edited(package(lowering), edit))
    assert {DECODE, BATCH} <= set(failed(outcome)) <= {DECODE, BATCH, GREEDY}
    assert place(outcome) == ("decode", f"layer {layer}")
    divergence = outcome[1]
    assert divergence is not None
    assert divergence.check == "decode of 32 given tokens"
    assert divergence.layer == layer


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_padding_that_a_row_sees(lowering: str) -> None:
    """The decode graph takes every column for a real one.

    Right for a row alone, wrong in a padded batch. With caches in place a mask is as wide as the buffers, so
    there it is always wrong.
    """

    def edit(_: Package, graphs: Graphs) -> None:
        graph = graphs[io_spec.DECODE].graph
        mask = next(value for value in graph.inputs if value.name == io_spec.ATTENTION_MASK)
        shape = ir.Node("", "Shape", [mask])
        one = ir.AttrTensor("value", ir.tensor(np.ones(1, dtype=np.int64)))
        ones = ir.Node("", "ConstantOfShape", shape.outputs, [one])
        for index, node in enumerate((shape, ones)):
            node.outputs[0].name = f"every_column_is_real.{index}"
        ir.convenience.replace_all_uses_with(mask, ones.outputs[0])
        shape.replace_input_with(0, mask)
        graph.insert_before(graph[0], [shape, ones])

    outcome = verify(edited(package(lowering), edit))
    expected = {"ort": [DECODE, BATCH, GREEDY], "portable": [BATCH]}
    assert failed(outcome) == expected[lowering]
    assert place(outcome) == ("decode", "layer 0")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_wrong_arg_max(lowering: str) -> None:
    """Logits are right, so no layer is to blame; only the greedy run sees it."""

    def edit(_: Package, graphs: Graphs) -> None:
        graph = graphs[io_spec.DECODE].graph
        next(node for node in graph if node.op_type == "ArgMax").op_type = "ArgMin"

    checks, divergence = verify(edited(package(lowering), edit))
    assert failed((checks, divergence)) == [GREEDY]
    assert divergence is None
    assert checks[GREEDY].note == "1 of 64 equal"  # the first comes from prefill


class Nearly:
    """A runner whose greedy choice at some steps is the second best, and everything else right."""

    def __init__(self, margin_below: float) -> None:
        self._right = runner(package("ort"))
        self._margin_below = margin_below

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        made: list[int] = []
        for _ in range(count):
            logits = self._right.logits([*ids, *made])[-1]
            second, best = np.argsort(logits)[-2:]
            close = logits[best] - logits[second] < self._margin_below
            made.append(int(second if close else best))
        return made


def test_a_tie_is_told_from_a_wrong_token() -> None:
    allowed = honest("ort", "fp32")[0][GREEDY].allowed
    reference, opened = EagerReference(eager()), package("ort")
    checks, _ = check_parity(Nearly(margin_below=0.5), reference, opened, IDS)
    assert not checks[GREEDY].ok
    assert allowed < checks[GREEDY].difference < 0.5

    class Flat(EagerReference):
        """The right answer is a tie at every position."""

        def logits(self, ids: Sequence[int]) -> Floats:
            logits = super().logits(ids)
            order = np.argsort(logits, axis=1)
            best = np.take_along_axis(logits, order[:, -1:], 1)
            np.put_along_axis(logits, order[:, -2:-1], best - allowed / 2, 1)
            return logits

    tied, _ = check_parity(Nearly(margin_below=np.inf), Flat(eager()), opened, IDS)
    assert tied[GREEDY].ok
    assert tied[GREEDY].note == "0 of 64 equal, 64 tied within what is allowed"


def test_a_package_as_the_reference() -> None:
    """One lowering against the other; a graph shows no hidden states, so no layer is named."""
    opened = package("portable")
    checks, _ = check_parity(runner(opened), runner(package("ort")), opened, IDS)
    assert all(check.ok for check in checks)
    wrong = edited(opened, lambda _, graphs: change_tensor(graphs, "rope_default_sin", np.negative))
    checks, divergence = check_parity(runner(wrong), runner(package("ort")), wrong, IDS)
    assert not checks[PREFILL].ok
    assert divergence is None


def test_short_texts_and_small_contexts() -> None:
    for length in (13, 20, 47):
        checks, _ = verify(package("ort"), IDS[:length])
        assert all(check.ok for check in checks)
    with pytest.raises(InputError, match="too few tokens to verify with; found 12; allowed: 13"):
        verify(package("ort"), IDS[:12])
    assert tokens_wanted(40) == 40


@pytest.mark.parametrize("graph", [io_spec.PREFILL, io_spec.DECODE])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_probe_leaves_the_numbers_alone(lowering: str, graph: str) -> None:
    """Residual streams of every row of a padded batch, and the logits, as the eager model has them."""
    opened = package(lowering)
    rows = [IDS[:9], IDS[3:20], IDS[7:10]]
    calls = Calls.of_batch(rows, 0 if graph == io_spec.PREFILL else 2)
    probe, names = probe_graph(opened.graph_path(graph), LAYERS)
    found = runner(opened).values(calls, probe, [*names, io_spec.LOGITS])
    reference = EagerReference(eager())
    for index, row in enumerate(rows):
        new = slice(len(row) - calls.last(index), None)
        streams = np.stack([found[index][name] for name in names])
        assert streams == pytest.approx(reference.hidden(row)[:, new], abs=1e-4)
        assert found[index][io_spec.LOGITS] == pytest.approx(reference.logits(row)[new], abs=1e-3)


def test_a_graph_that_does_not_name_its_layers() -> None:
    with pytest.raises(ExportError, match=r"cannot be told apart .* found 2 places .*; allowed: 4"):
        probe_graph(package("ort").graph_path(io_spec.PREFILL), LAYERS + 1)


def test_calls() -> None:
    calls = Calls.of_row([1, 2, 3, 4, 5, 6], (2, 1))
    assert calls.chunks == (((1, 2),), ((3,),))
    assert calls.steps == ((4,), (5,), (6,))
    assert (calls.tokens(0), calls.ends(0)) == ([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6])
    assert calls.kept(0) == [0, 1, 2, 3, 4, 5]
    assert [calls.call_of(0, position) for position in range(6)] == [0, 0, 1, 2, 3, 4]
    assert calls.until(0) == Calls((((1, 2),),))
    assert calls.until(3) == Calls.of_row([1, 2, 3, 4, 5], (2, 1))
    assert (calls.until(1).graph, calls.graph) == ("prefill", "decode")

    batch = Calls.of_batch([[1, 2, 3], [4, 5, 6, 7]], 2)
    assert batch.chunks == (((1,), (4, 5)),)
    assert batch.steps == ((2, 6), (3, 7))
    assert (batch.kept(0), batch.kept(1)) == ([0, 1, 2], [1, 2, 3])
    assert (batch.tokens(1), batch.call_of(1, 2), batch.last(1)) == ([4, 5, 6, 7], 1, 1)
