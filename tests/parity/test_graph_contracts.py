"""What other programs rely on in exported graphs: axes, names, any size, no warnings, no assertions."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys

import pytest
import torch
from parity.tolerances import tolerance
from support.exported import Exported, Runner, eager, exported, oracle
from support.matrix import exports, tiny_exports
from support.parity import assert_logits_close

from onnxlm.export.lowerings import find_lowering

TOKENS = [(37 * position + 11) % 89 for position in range(64)]
FP32 = tolerance("graph", "float32")


@pytest.fixture(params=exports())
def case(request: pytest.FixtureRequest) -> Exported:
    return exported(*request.param)


@pytest.mark.parametrize("key", tiny_exports())
def test_every_batch_length_and_past(key: tuple[str, str]) -> None:
    family, lowering = key
    case = exported(family, "tiny", lowering)
    runner = case.runner()
    for rows, new, past_columns in itertools.product((1, 3, 8), (1, 2, 33), (0, 1, 31)):
        ids = torch.tensor([TOKENS, TOKENS[::-1], *[TOKENS[i:] + TOKENS[:i] for i in range(6)]])
        ids = ids[:rows, : past_columns + new]
        with torch.inference_mode():
            whole = oracle(family)(ids).logits
        past = runner.empty(rows)
        if past_columns:
            _, past = runner.run(ids[:, :past_columns], past)
        logits, present = runner.run(ids[:, past_columns:], past, keep=new)
        assert_logits_close(logits, whole[:, past_columns:], FP32)
        assert {value.shape[2] for value in present.values()} == {past_columns + new}
        if new == 1:
            logits, _ = runner.step(ids[:, -1], past)
            assert_logits_close(logits, whole[:, -1:], FP32)


@pytest.mark.parametrize("key", tiny_exports())
def test_declared_axes(key: tuple[str, str]) -> None:
    """Names of the axes as the files declare them, to the letter: other runtimes go by them."""
    family, lowering = key
    case = exported(family, "tiny", lowering)
    model = eager(family)
    vocab = model.lm_head.weight.shape[0]
    parts = {
        f"{i}.{part}": shape
        for i, kept in enumerate(model.state_shapes)
        for part, shape in kept.items()
    }
    windows = {part: model.windows[int(part.split(".")[0])] for part in parts}
    past = {p: "window_past_length" if w else "past_sequence_length" for p, w in windows.items()}
    total = {p: "window_total_length" if w else "total_sequence_length" for p, w in windows.items()}
    evicted = [("num_evicted_tokens", ["evicted_rows", "evicted_given"])]
    if lowering != "ort" or not any(windows.values()):
        evicted = []
    twins = {state: shape for state, shape in parts.items() if state.endswith(".latent")}
    runner = case.runner()
    for session, new, kept in (
        (runner.prefill, "sequence_length", "num_logits_to_keep"),
        (runner.decode, 1, 1),
    ):
        assert {value.name: value.shape for value in session.get_inputs()} == {
            "input_ids": ["batch_size", new],
            "attention_mask": ["batch_size", "total_sequence_length"],
            **{
                f"past_key_values.{p}": ["batch_size", h, past[p], w] for p, (h, w) in parts.items()
            },
        }
        assert {value.name: value.shape for value in session.get_outputs()} == {
            "logits": ["batch_size", kept, vocab],
            **{f"present.{p}": ["batch_size", h, total[p], w] for p, (h, w) in parts.items()},
            **{
                f"present.{p}.twin": ["batch_size", h, total[p], w]
                for p, (h, w) in twins.items()
                if lowering == "ort"
            },
            "next_tokens": ["batch_size", 1],
        }
    for session, optional in (
        (runner.prefill, [*evicted, ("num_logits_to_keep", [])]),
        (runner.decode, evicted),
    ):
        found = [(value.name, value.shape) for value in session.get_overridable_initializers()]
        assert sorted(found) == optional


def test_nothing_to_warn_of(case: Exported, capfd: pytest.CaptureFixture[str]) -> None:
    """No shape that differs from the declared one, no weight that nothing reads."""
    for optimized in (False, True):
        runner = Runner(case.folder, optimized, log_severity=2)
        past = runner.empty(3)
        for new in (1, 2, 33):
            _, past = runner.run([TOKENS[:new]] * 3, past, keep=new)
            _, past = runner.step(TOKENS[:3], past)
    lines = [line for line in capfd.readouterr().err.splitlines() if "onnxruntime" in line]
    # That is how an input is optional.
    known = re.compile(
        "Initializer (num_logits_to_keep|num_evicted_tokens) appears in graph inputs"
    )
    assert [line for line in lines if not known.search(line)] == []
    # Once a session and input: what this test reads is where warnings go.
    windowed = case.lowering == "ort" and any(eager(case.family, case.variant).windows)
    assert len(lines) == 2 * (3 if windowed else 1)


UNDER_O = """
import json, pathlib, sys, tempfile
import numpy as np, onnxruntime, torch
from onnxlm.export.lowerings import find_lowering
from onnxlm.export.pipeline import build_graphs
from onnxlm.export.tracing import trace
from onnxlm.graphs.weights_file import write_graphs
from onnxlm.models.config import ConfigReader
from onnxlm.models.registry import find_architecture

if __debug__:
    sys.exit("assertions are on")
architecture = find_architecture(sys.argv[1])
torch.manual_seed(0)
model = architecture.build(architecture.parse_config(ConfigReader(architecture.tiny, ""))).eval()
ids = np.arange(2, 9)[None]
lowering = find_lowering("ort")
graphs = build_graphs(trace(model, lowering), lowering)
with tempfile.TemporaryDirectory() as folder:
    models = {key: graph.model for key, graph in graphs.items()}
    write_graphs(models, pathlib.Path(folder), "data")
    session = onnxruntime.InferenceSession(f"{folder}/prefill")
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for value in session.get_inputs()[2:]:
        feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    last = session.run(["logits"], feeds)[0][0, -1]
error = float(np.abs(last - model.logits(ids[0])[-1].numpy()).max())
fusions = {key: graph.fusions for key, graph in graphs.items()}
print(json.dumps({"error": error, "fusions": fusions}))
"""


def test_assertions_carry_no_logic() -> None:
    """`python -O` removes them; the graphs and their numbers stay."""
    command = [sys.executable, "-O", "-c", UNDER_O, "llama"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    graphs = exported("llama", "tiny", "ort").graphs
    assert result["fusions"] == {name: graph.fusions for name, graph in graphs.items()}
    assert result["error"] <= FP32


def test_graphs_for_any_runtime_use_standard_operators_only(case: Exported) -> None:
    if case.lowering == "ort":
        pytest.skip("made for ONNX Runtime")
    for graph in case.graphs.values():
        assert {node.domain for node in graph.model.graph} == {""}
        assert dict(graph.model.graph.opset_imports) == {"": find_lowering(case.lowering).opset}


def test_folder_holds_nothing_else(case: Exported) -> None:
    files = {path.name for path in case.folder.iterdir()}
    assert files == {"prefill.onnx", "decode.onnx", "model.onnx_data"}
