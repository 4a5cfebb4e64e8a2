"""Sessions: the provider asked for or an error, and as many threads as the process has cores."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest
from support.runtime_models import counting_package, loaded

from onnxlm.errors import InputError, PackageError, ProviderError
from onnxlm.runtime import load
from onnxlm.runtime.providers import cuda, find_provider
from onnxlm.runtime.session import (
    SessionConfig,
    open_session,
    provider_in_use,
    session_options,
    usable_cores,
)

NO_CUDA = "CUDAExecutionProvider" not in ort.get_available_providers()
without_cuda = pytest.mark.skipif(not NO_CUDA, reason="this onnxruntime has CUDA")
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


@pytest.mark.parametrize("threads", [-1, -8])
def test_a_negative_number_of_threads(threads: int) -> None:
    message = rf"^threads; found {threads}; allowed: 0 \(all cores\) or more$"
    with pytest.raises(InputError, match=message):
        SessionConfig(threads=threads)


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


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "300000 100000\n"}, 3),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "nonsense\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_a_container_gives_fewer_cores_than_the_machine_has(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="ascii")
    assert usable_cores(tmp_path) == cores


def test_a_system_without_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, cores in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert usable_cores(tmp_path) == cores


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
    assert model.sessions.device == ("cpu", 0)
    assert model.generate("AB", max_new_tokens=3).text == "CDE"


def test_an_available_list_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is asked what it runs on."""
    if not NO_CUDA:
        pytest.skip("this onnxruntime has CUDA")
    monkeypatch.setattr(
        ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    assert find_provider("cuda").unavailable() is None
    message = "asked for CUDAExecutionProvider, the session runs on CPUExecutionProvider; mend"
    with pytest.raises(ProviderError, match=message), pytest.warns(UserWarning, match="CUDA"):
        load(counting_package().path, provider="cuda")
    with pytest.warns(UserWarning, match="CUDA"):
        model = load(counting_package().path, provider="cuda", allow_fallback=True)
    assert model.provider == "cpu"
    assert model.fallback == "onnxruntime could not open it on CUDAExecutionProvider"
    assert model.generate("AB", max_new_tokens=3).text == "CDE"


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


class Refusing:
    """An InferenceSession whose provider fails while it is set up."""

    def __init__(self, path: str, options: object, providers: list[object], **more: object) -> None:
        self._name = providers[0][0]  # type: ignore[index]
        if self._name == "CUDAExecutionProvider":
            raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")

    def get_providers(self) -> list[str]:
        return [self._name]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(ort, "InferenceSession", Refusing)


@pytest.mark.usefixtures("refusing")
def test_a_provider_that_fails_while_it_opens_a_graph(tmp_path: Path) -> None:
    config = SessionConfig(provider="cuda", threads=1)
    message = (
        "g: onnxruntime cannot load it on CUDAExecutionProvider; found CUDA failure 100: no CUDA"
    )
    with pytest.raises(PackageError, match=message):
        open_session(tmp_path / "g", config, ort.SessionOptions())
    allowed = SessionConfig(provider="cuda", threads=1, allow_fallback=True)
    session = open_session(tmp_path / "g", allowed, ort.SessionOptions())
    assert provider_in_use(session) == "cpu"
