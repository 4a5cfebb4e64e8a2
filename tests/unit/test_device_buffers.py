"""Buffers on a device: nothing but ids and logits passes the processor, and the numbers are the host's.

The device is a stand-in: the processor's memory, treated as a device's. What is left to a real one is whether
its kernels and copies are right; the tests marked `gpu` ask that.
"""

from __future__ import annotations

import base64
import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.helper as h
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto as T
from support.batches import assert_behind, assert_close, both, hot, prefilled, some_ids
from support.hot import oracle_logits
from support.hot_packages import package as hot_source
from support.runtime_models import loaded, windowed_oracle, windowed_package

from onnxlm.errors import ProviderError
from onnxlm.runtime import (
    cache_rows,
    device_buffers,
    engine,
    graph_calls,
    in_place_cache,
    opening,
)
from onnxlm.runtime.device_buffers import Device
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.session import SessionConfig
from onnxlm.runtime.sessions import Sessions

CPU = Device()


class Traffic:
    """What was read from the device's buffers and written there, by shape."""

    def __init__(self) -> None:
        self.read: Counter[tuple[int, ...]] = Counter()
        self.written: Counter[tuple[int, ...]] = Counter()

    def clear(self) -> None:
        self.read.clear()
        self.written.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """No device is the host, and every look into a buffer is counted."""
    traffic = Traffic()
    read, write = ort.OrtValue.numpy, ort.OrtValue.update_inplace

    def numpy(self: ort.OrtValue) -> NDArray[np.generic]:
        traffic.read[tuple(self.shape())] += 1
        return read(self)

    def update(self: ort.OrtValue, data: NDArray[np.generic]) -> None:
        traffic.written[tuple(self.shape())] += 1
        write(self, data)

    for module in (cache_rows, device_buffers, engine, graph_calls, in_place_cache):
        monkeypatch.setattr(module, "on_host", lambda device: False)
    monkeypatch.setattr(ort.OrtValue, "numpy", numpy)
    monkeypatch.setattr(ort.OrtValue, "update_inplace", update)
    yield traffic
    device_buffers._mover.cache_clear()


@pytest.mark.parametrize(("data_type", "element"), [("float", T.FLOAT), ("float16", T.FLOAT16)])
def test_the_embedded_graph_is_a_gather_and_a_pad(data_type: str, element: int) -> None:
    nodes = [
        h.make_node("Gather", ["x", "r"], ["g"], axis=0),
        h.make_node("Pad", ["g", "p"], ["y"]),
    ]
    types = {"x": element, "r": T.INT64, "p": T.INT64}
    inputs = [h.make_tensor_value_info(name, kind, None) for name, kind in types.items()]
    graph = h.make_graph(nodes, "move", inputs, [h.make_tensor_value_info("y", element, None)])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=8)
    embedded = base64.b64decode(device_buffers.MOVERS[f"tensor({data_type})"])
    assert onnx.load_from_string(embedded) == model


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("kept", "size"), [(3, 3), (3, 7), (2, 3), (2, 7), (2, 2), (0, 4), (3, 2)])
@pytest.mark.parametrize("where", ["host", "device"])
def test_a_buffer_of_another_length(
    where: str, kept: int, size: int, dtype: str, request: pytest.FixtureRequest
) -> None:
    if where == "device":
        request.getfixturevalue("device")
    values = np.random.default_rng(0).normal(size=(2, 4, 3, 5)).astype(dtype)
    kept = min(kept, size)
    buffer = ort.OrtValue.ortvalue_from_numpy(values)
    resized = device_buffers.resized(buffer, 2, kept, size, CPU)
    new = resized.numpy()  # a view
    assert (new.shape, new.dtype) == ((2, 4, size, 5), np.dtype(dtype))
    np.testing.assert_array_equal(new[:, :, :kept], values[:, :, :kept])
    assert not new[:, :, kept:].any()


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_buffer_without_its_first_entries(where: str, request: pytest.FixtureRequest) -> None:
    if where == "device":
        request.getfixturevalue("device")
    values = np.random.default_rng(0).normal(size=(2, 4, 7, 5)).astype(np.float32)
    buffer = ort.OrtValue.ortvalue_from_numpy(values)
    for skipped, kept, size in ((3, 4, 4), (2, 3, 3), (1, 2, 6), (6, 1, 1)):
        new = device_buffers.resized(buffer, 2, kept, size, CPU, skipped).numpy()
        assert new.shape == (2, 4, size, 5)
        np.testing.assert_array_equal(new[:, :, :kept], values[:, :, skipped : skipped + kept])
        assert not new[:, :, kept:].any()


@pytest.mark.usefixtures("device")
@both
def test_windows_on_a_device_lose_their_tokens(lowering: str) -> None:
    sessions = loaded(windowed_package(lowering).path).sessions
    rows = some_ids(400, 3)
    batch = prefilled(sessions, rows)
    for token in range(30):
        batch.set_tokens([token, token + 1])
        rows = [[*row, token + i] for i, row in enumerate(rows)]
        logits = batch.decode_logits()
    theirs = torch.stack([oracle_logits(windowed_oracle(), row)[-1] for row in rows])
    assert_close(logits, theirs)


@pytest.mark.usefixtures("device")
def test_rows_in_another_order() -> None:
    values = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    buffer = ort.OrtValue.ortvalue_from_numpy(values)
    for rows in ([2, 0, 1], [1, 1], [0, 0, 1, 2]):
        taken = device_buffers.taken(buffer, np.array(rows), CPU)
        np.testing.assert_array_equal(taken.numpy(), values[rows])


@both
def test_a_batch_on_a_device_goes_on_as_on_the_host(lowering: str, device: Traffic) -> None:
    """Past a growth of the cache, a rewind, rows in another order, and a fork."""
    rows = some_ids(250, 3)
    batch = prefilled(hot(lowering), rows)
    for token in range(12):
        batch.set_tokens([token, token + 1])
        rows = [[*row, token + i] for i, row in enumerate(rows)]
        logits = batch.decode_logits()
        if token in (0, 6, 11):
            assert_behind(logits, rows)
    batch.rewind(np.array([200, 5]))
    rows = [rows[0][:200], rows[1][:5]]
    fork = batch.fork()
    batch.reorder(np.array([1, 0, 1]))
    rows = [rows[1], rows[0], rows[1]]
    more = some_ids(4, 2, 1, seed=1)
    expected = [row + new for row, new in zip(rows, more, strict=True)]
    assert_behind(batch.prefill_logits(more), expected)
    assert_behind(fork.prefill_logits(more[:2]), [rows[1] + more[0], rows[0] + more[1]])
    assert not [shape for shape in device.read if len(shape) == 4]


def test_a_greedy_step_reads_one_id_a_row_and_writes_a_mask(device: Traffic) -> None:
    """[2, 1] are the ids of two rows; the mask goes into the buffer that is bound; nothing else moves."""
    sessions = hot("ort")
    batch = Batch(sessions, 2)
    batch.set_tokens(batch.prefill_tokens(some_ids(5, 9)))
    batch.decode_tokens()
    device.clear()
    for _ in range(10):
        batch.decode_tokens()
    assert device.read == {(2, 1): 10}
    assert device.written == {(2, 256): 10}


def test_an_fp16_cache_stays_fp16_on_a_device(device: Traffic) -> None:
    sessions = loaded(hot_source("ort", "fp16").path).sessions
    batch = Batch(sessions, 1)
    batch.prefill_tokens([[5] * 60])
    batch.reorder(np.array([0, 0]))
    batch.set_tokens([3, 3])
    first, second = batch.decode_logits()
    np.testing.assert_array_equal(first, second)
    assert {b.data_type() for b in batch.cache.buffers.values()} == {"tensor(float16)"}
    assert not [shape for shape in device.read if len(shape) == 4]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "BFCArena: Failed to allocate memory for requested buffer of size 8",
            "^CUDAExecutionProvider has too little memory for this; found BFCArena: .* of size 8; "
            "raise --gpu-mem-limit, or use a smaller package, fewer rows or a shorter context$",
        ),
        (
            "CUDA failure 801: operation not supported",
            "^CUDAExecutionProvider could load the graphs and cannot make a buffer on device 1; found CUDA "
            "failure 801: operation not supported; try another provider$",
        ),
    ],
)
def test_a_device_that_makes_no_buffer(
    monkeypatch: pytest.MonkeyPatch, said: str, message: str
) -> None:
    def refuse(array: NDArray[np.generic], *device: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", refuse)
    with pytest.raises(ProviderError, match=message):
        device_buffers.placed(np.zeros(1), Device("cuda", 1))


def test_buffers_that_grow_keep_to_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit comes with the device of a package's sessions; without one there is none."""

    class NotedError(Exception):
        pass

    def note(model: bytes, options: object, providers: list[object], **more: object) -> None:
        raise NotedError(providers)

    limited = opening._device("cuda", SessionConfig("cuda", device_id=1, gpu_mem_limit=1 << 20))
    assert limited == Device("cuda", 1, 1 << 20)
    buffer = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, 2), dtype=np.float32))
    monkeypatch.setattr(ort, "InferenceSession", note)
    for device, limit in ((limited, str(1 << 20)), (Device("cuda", 1), None)):
        with pytest.raises(NotedError) as raised:
            device_buffers.taken(buffer, np.array([0]), device)
        (((name, options),),) = raised.value.args
        assert name == "CUDAExecutionProvider"
        assert (options["device_id"], options.get("gpu_mem_limit")) == ("1", limit)


class Recorder:
    """A decode session that notes the number each run names, and the buffers bound."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.numbers: list[str] = []
        self.released: list[int] = []

    def io_binding(self) -> ort.IOBinding:
        return self._session.io_binding()

    def run_with_iobinding(self, binding: ort.IOBinding, options: ort.RunOptions | None) -> None:
        assert options is not None
        self.numbers.append(options.get_run_config_entry("gpu_graph_id"))
        self._session.run_with_iobinding(binding)

    def release_captured_graph(self, number: int) -> None:
        self.released.append(number)


def captured(sessions: Sessions) -> tuple[Sessions, Recorder]:
    recorder = Recorder(sessions.decode)
    return dataclasses.replace(sessions, decode=recorder, graph_capture=True), recorder


@pytest.mark.usefixtures("device")
def test_a_recorded_step_keeps_its_buffers_and_its_number() -> None:
    """One record for greedy steps, one for logits; new ones, the old released, when the cache has grown."""
    sessions, recorder = captured(hot("ort"))
    batch = Batch(sessions, 1)
    (row,) = some_ids(250)
    batch.set_tokens(batch.prefill_tokens([row]))
    greedy = [int(batch.decode_tokens()[0]) for _ in range(3)]
    plain = Batch(hot("ort"), 1)
    plain.set_tokens(plain.prefill_tokens([row]))
    assert greedy == [int(plain.decode_tokens()[0]) for _ in range(3)]
    first = set(recorder.numbers)
    assert len(first) == 1
    batch.decode_logits()
    second = set(recorder.numbers) - first
    assert len(second) == 1
    assert recorder.released == []
    for _ in range(4):  # past 256 columns
        batch.decode_tokens()
    assert sorted(recorder.released) == sorted(int(number) for number in first | second)
    assert len(set(recorder.numbers) - first - second) == 1
    last = int(recorder.numbers[-1])
    del batch
    assert last in recorder.released
