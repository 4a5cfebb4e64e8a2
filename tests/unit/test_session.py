"""Sessions: the provider asked for or an error, and as many threads as the process has cores."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from support.batches import some_ids
from support.parity import assert_logits_close
from support.runtime_models import at_once, counting_package, hot_package, loaded

from onnxlm.errors import InputError, PackageError, ProviderError
from onnxlm.runtime import load
from onnxlm.runtime.cores import usable_cores
from onnxlm.runtime.device_buffers import HOST
from onnxlm.runtime.providers import _nvidia, cuda, find_provider
from onnxlm.runtime.session import (
    SessionConfig,
    open_session,
    provider_in_use,
    session_options,
)

NO_CUDA = "CUDAExecutionProvider" not in ort.get_available_providers()
without_cuda = pytest.mark.skipif(not NO_CUDA, reason="this onnxruntime has CUDA")
TILES = "ORT_GQA_DISABLE_FLASH_ATTENTION"
LACKS_CUDA = f"the installed onnxruntime {ort.__version__} has no CUDAExecutionProvider"


def graph() -> Path:
    return counting_package().graph_path("decode")


def options_of(config: SessionConfig) -> tuple[int, str]:
    options = session_options(config)
    return options.intra_op_num_threads, options.get_session_config_entry("session.probe")


def test_options() -> None:
    config = SessionConfig(threads=3, options={"session.probe": "x"})
    assert options_of(config) == (3, "x")
    assert session_options(SessionConfig()).intra_op_num_threads == usable_cores()


def test_how_long_threads_wait_awake_can_be_chosen() -> None:
    key = "session.intra_op.spin_duration_us"
    own = session_options(SessionConfig(options={key: "5000"}))
    assert session_options(SessionConfig()).get_session_config_entry(key) == "300"
    assert own.get_session_config_entry(key) == "5000"


LOGITS = """
import sys
from onnxlm.runtime import load

print(load(sys.argv[1], threads=1).logits([1 + number % 90 for number in range(200)]).tobytes().hex())
"""


def test_attention_is_not_tiled_unless_asked_for() -> None:
    """Tiles are added up in another order: the same numbers, but not to the last bit."""
    others = {name: value for name, value in os.environ.items() if name != TILES}
    found = {}
    for given in ("unset", "1", "0"):
        ran = subprocess.run(
            [sys.executable, "-c", LOGITS, hot_package("ort").path],
            check=True,
            capture_output=True,
            text=True,
            env=others | ({} if given == "unset" else {TILES: given}),
        )
        found[given] = np.frombuffer(bytes.fromhex(ran.stdout), np.float32)
    assert np.array_equal(found["unset"], found["1"])
    assert not np.array_equal(found["unset"], found["0"])
    largest = max(1.0, np.abs(found["0"]).max())
    assert np.abs(found["unset"] - found["0"]).max() <= 1e-4 * largest


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("threads", -1, r"0 \(all cores\) or more"),
        ("device_id", -2, "0 or more"),
        ("gpu_mem_limit", -1, r"0 \(no limit\) or more bytes"),
    ],
)
def test_a_negative_number(field: str, value: int, allowed: str) -> None:
    with pytest.raises(InputError, match=rf"^{field}; found {value}; allowed: {allowed}$"):
        SessionConfig(**{field: value})


@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_do_not_depend_on_the_threads(threads: int) -> None:
    """Against transformers, which ran on threads of its own."""
    model = load(hot_package().path, threads=threads)
    (row,) = some_ids(40)
    ours = torch.from_numpy(model.logits(row))
    assert_logits_close(ours, at_once(row), 1e-5)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_one_core_is_one_thread() -> None:
    program = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from onnxlm.runtime.session import SessionConfig, open_session\n"
        f"session = open_session({str(graph())!r}, SessionConfig())\n"
        "print(session.get_session_options().intra_op_num_threads, len(os.listdir('/proc/self/task')))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    threads, tasks = map(int, ran.stdout.split())
    assert threads == 1
    alone = subprocess.run(
        [sys.executable, "-c", program.replace("SessionConfig())", "SessionConfig(threads=3))")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(alone.stdout.split()[1]) == tasks + 2  # the pool's threads beside the caller's


def test_the_provider_in_use() -> None:
    assert provider_in_use(open_session(graph(), SessionConfig(threads=1))) == "cpu"
    model = loaded(counting_package().path)
    assert (model.provider, model.fallback) == ("cpu", None)


@without_cuda
def test_a_provider_that_is_not_there() -> None:
    message = f"execution provider 'cuda' cannot be used: {LACKS_CUDA}; {cuda.PROVIDER.install}"
    with pytest.raises(ProviderError, match=f"^{re.escape(message)}$"):
        load(counting_package().path, provider="cuda")


def test_a_provider_that_is_not_known() -> None:
    for allow in (False, True):
        with pytest.raises(ProviderError, match="execution provider is not known; found 'cdua'"):
            load(counting_package().path, provider="cdua", allow_fallback=allow)


@without_cuda
def test_fallback_is_labelled_and_works() -> None:
    model = load(counting_package().path, provider="cuda", allow_fallback=True, device_id=1)
    assert (model.provider, model.fallback) == ("cpu", LACKS_CUDA)
    assert model.sessions.device == HOST
    assert model.generate("AB", max_new_tokens=3).text == "CDE"


def test_an_available_list_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is asked what it runs on."""
    if not NO_CUDA:
        pytest.skip("this onnxruntime has CUDA")
    monkeypatch.setattr(
        ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(_nvidia, "missing", lambda library: None)
    assert find_provider("cuda").unavailable() is None
    path = hot_package("portable").path
    message = "asked for CUDAExecutionProvider, the session runs on CPUExecutionProvider; mend"
    with pytest.raises(ProviderError, match=message), pytest.warns(UserWarning, match="CUDA"):
        load(path, provider="cuda")
    with pytest.warns(UserWarning, match="CUDA"):
        model = load(path, provider="cuda", allow_fallback=True)
    assert model.provider == "cpu"
    assert model.fallback == "onnxruntime could not open it on CUDAExecutionProvider"
    (row,) = some_ids(9)
    assert_logits_close(torch.from_numpy(model.logits(row)), at_once(row))


@pytest.mark.parametrize("allow_fallback", [False, True])
def test_a_file_that_is_no_graph(
    allow_fallback: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.onnx"
    file.write_bytes(b"no graph at all")
    with pytest.raises(PackageError) as raised:
        open_session(file, SessionConfig(threads=1, allow_fallback=allow_fallback))
    message = str(raised.value)
    assert message.startswith(f"{file}: onnxruntime cannot load it on CPUExecutionProvider; found ")
    assert "\n" not in message
    assert capfd.readouterr().out == ""  # the text that a model gives goes there


def test_a_step_that_changes_its_shape_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(_nvidia, "missing", lambda library: None)
    message = "another shape each time .* found lowering portable; allowed: lowering ort$"
    with pytest.raises(InputError, match=message):
        load(hot_package("portable").path, provider="cuda", graph_capture=True)
