"""Several graphs over one data file: each tensor once, no stray byte, written whole or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from support.exported import CASES, DATA, eager, exported
from support.matrix import REPRESENTATIVES, cases, is_default
from support.onnx_text import graph, random

from onnxlm.export.lowerings import find_lowering
from onnxlm.export.pipeline import build_graphs
from onnxlm.export.tracing import trace
from onnxlm.graphs.edit import lazy_tensor
from onnxlm.graphs.weights_file import write_graphs
from onnxlm.models.registry import architecture_names

PAGE, ALIGNMENT, LARGE = 4096, 64, 1 << 20


def entries(path: Path) -> dict[str, dict[str, str]]:
    """External-data fields of every initializer that has them."""
    proto = onnx.load(path, load_external_data=False)
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in proto.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


def spans(*files: Path) -> list[tuple[int, int]]:
    """(offset, end) of every tensor in the data file, in order, each once."""
    found = {
        (int(fields["offset"]), int(fields["offset"]) + int(fields["length"]))
        for file in files
        for fields in entries(file).values()
    }
    return sorted(found)


def unclaimed(data: bytes, claimed: list[tuple[int, int]]) -> Iterator[tuple[bytes, int]]:
    """(bytes that no tensor owns, offset of the tensor behind them)."""
    end = 0
    for start, stop in claimed:
        assert start >= end, "two tensors overlap"
        yield data[end:start], start
        end = stop
    assert end == len(data), "bytes behind the last tensor"


def check_every_byte(folder: Path, data_name: str = DATA) -> None:
    files = sorted(folder.glob("*.onnx"))
    data = (folder / data_name).read_bytes()
    for gap, start in unclaimed(data, spans(*files)):
        assert not any(gap)
        assert len(gap) < PAGE
        assert start % ALIGNMENT == 0
        if len(gap) >= ALIGNMENT:
            assert start % PAGE == 0


EXPORTS = cases(
    [
        *((*case, lowering, torch.float32) for case in CASES for lowering in ("ort", "portable")),
        *((family, "tiny", "ort", torch.float16) for family in architecture_names()),
    ],
    lambda family, variant, lowering, dtype: (
        is_default(family, variant, lowering)
        and (dtype == torch.float32 or family in REPRESENTATIVES)
    ),
)


@pytest.mark.parametrize("key", EXPORTS)
def test_each_parameter_is_stored_once(key: tuple[str, str, str, torch.dtype]) -> None:
    """Tied or not: bytes on disk are bytes of distinct parameters and tables."""
    case = exported(*key)
    model = eager(key[0], key[1], key[3])
    unique = {t.data_ptr(): t.nbytes for t in itertools.chain(model.parameters(), model.buffers())}
    files = [case.folder / "prefill.onnx", case.folder / "decode.onnx"]
    external = sum(stop - start for start, stop in spans(*files))
    assert external <= 1.05 * sum(unique.values())
    assert (case.folder / DATA).stat().st_size <= 1.05 * sum(unique.values())
    assert external >= 0.9 * sum(unique.values())  # small vectors lie in the graphs
    check_every_byte(case.folder)


@pytest.mark.parametrize("key", EXPORTS)
def test_graphs_refer_to_the_same_entries(key: tuple[str, str, str, torch.dtype]) -> None:
    folder = exported(*key).folder
    prefill, decode = entries(folder / "prefill.onnx"), entries(folder / "decode.onnx")
    assert prefill == decode
    assert {fields["location"] for fields in prefill.values()} == {DATA}


def test_tied_table_is_one_tensor() -> None:
    case = exported("llama", "tiny", "ort")
    graph = case.graphs["decode"].model.graph
    readers = {node.op_type for node, _ in graph.initializers["embed_tokens.weight"].uses()}
    assert readers == {"Gather", "FusedMatMul"}
    assert "lm_head.weight" not in graph.initializers
    untied = exported("llama", "untied, all KV heads, narrow, yarn", "ort").graphs["decode"]
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(untied.model.graph.initializers)


def test_writing_again_changes_no_byte(tmp_path: Path) -> None:
    """The second time, the graphs read from the very file that is replaced."""
    lowering = find_lowering("ort")
    graphs = build_graphs(trace(eager("llama"), lowering), lowering)
    models = {f"{name}.onnx": graph.model for name, graph in graphs.items()}
    written = []
    for _ in range(3):
        size = write_graphs(models, tmp_path, DATA)
        written.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
        assert size == len(written[-1][DATA])
    assert written[0] == written[1] == written[2]
    assert set(written[0]) == {"prefill.onnx", "decode.onnx", DATA}


ROWS = LARGE // (64 * 4)


def two_graphs(seed: int = 0) -> dict[str, ir.Model]:
    """Two files with the same weights: one of 2 KiB, one of exactly 1 MiB, one of 32 bytes."""
    weights = {
        "small": random(8, 64, seed=seed),
        "large": random(ROWS, 64, seed=seed),
        "inline": random(8, seed=seed),
    }
    body = "a = Add(x, inline)\nb = MatMul(a, small)\ny = Add(b, large)"
    return {
        f"{name}.onnx": graph("float[N,8] x", "float[N,64] y", body, weights)
        for name in ("first", "second")
    }


def test_small_tensors_lie_in_the_graph_and_large_ones_in_pages(tmp_path: Path) -> None:
    models = two_graphs()
    size = write_graphs(models, tmp_path, "weights")
    first = entries(tmp_path / "first.onnx")
    assert first == entries(tmp_path / "second.onnx")
    assert {name: (fields["offset"], fields["length"]) for name, fields in first.items()} == {
        "small": ("0", "2048"),
        "large": ("4096", str(LARGE)),
    }
    assert size == (tmp_path / "weights").stat().st_size == 4096 + LARGE
    check_every_byte(tmp_path, "weights")
    x = random(ROWS, 8, seed=3)
    expected = (x + random(8)) @ random(8, 64) + random(ROWS, 64)
    for name in models:
        actual = ort.InferenceSession(tmp_path / name).run(None, {"x": x})[0]
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_progress_ends_at_the_size(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    size = write_graphs(two_graphs(), tmp_path, "weights", lambda *call: calls.append(call))
    assert [total for _, total in calls] == [2048 + LARGE] * 2
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == size


def test_one_name_for_two_tensors_is_refused(tmp_path: Path) -> None:
    """Same name, shape and type, other numbers: silently taking one would change the other graph."""
    models = two_graphs()
    other = random(8, 64, seed=2)
    models["second.onnx"].graph.initializers["small"].const_value = ir.tensor(other, name="small")
    with pytest.raises(ValueError, match=r"second\.onnx: small is another tensor"):
        write_graphs(models, tmp_path, "weights")
    assert list(tmp_path.iterdir()) == []


def test_equal_tensors_of_one_name_are_one(tmp_path: Path) -> None:
    models = two_graphs()
    copy = random(8, 64).copy()
    models["second.onnx"].graph.initializers["small"].const_value = ir.tensor(copy, name="small")
    assert write_graphs(models, tmp_path, "weights") == 4096 + LARGE


def test_initializer_without_value_is_named(tmp_path: Path) -> None:
    models = two_graphs()
    models["second.onnx"].graph.initializers["large"].const_value = None
    with pytest.raises(ValueError, match=r"second\.onnx: initializer large has no value"):
        write_graphs(models, tmp_path, "weights")


def test_fault_in_the_middle_leaves_the_old_pair(tmp_path: Path) -> None:
    models = two_graphs()
    write_graphs(models, tmp_path, "weights")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail() -> np.ndarray:
        raise OSError("no space left on device")

    broken = two_graphs(seed=5)
    for model in broken.values():
        tensor = lazy_tensor("large", ir.DataType.FLOAT, (ROWS, 64), fail)
        model.graph.initializers["large"].const_value = tensor
    with pytest.raises(OSError, match="no space left"):
        write_graphs(broken, tmp_path, "weights")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_open_reader_keeps_the_old_file(tmp_path: Path) -> None:
    """A session that runs from a mapped file is not given other numbers under its hands."""
    write_graphs(two_graphs(), tmp_path, "weights")
    mapped = np.memmap(tmp_path / "weights", dtype=np.float32, mode="r", shape=(8, 64))
    write_graphs(two_graphs(seed=5), tmp_path, "weights")
    np.testing.assert_array_equal(mapped, random(8, 64))
    now = np.fromfile(tmp_path / "weights", dtype=np.float32, count=8 * 64)
    np.testing.assert_array_equal(now.reshape(8, 64), random(8, 64, seed=5))
