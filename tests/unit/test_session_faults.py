"""Sessions that a provider cannot open, cannot run or runs on the CPU: stand-ins say what a device would."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest
from support.runtime_models import counting_package, loaded

from onnxlm.errors import PackageError, ProviderError
from onnxlm.runtime import load, session
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.placement import package_placement
from onnxlm.runtime.providers import Provider, _nvidia, cuda
from onnxlm.runtime.session import (
    SessionConfig,
    left_to_cpu,
    open_session,
    provider_in_use,
    run_bound,
)


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
    monkeypatch.setattr(_nvidia, "missing", lambda library: None)
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


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(
    "options", [{"device_id": 1}, {"gpu_mem_limit": 1 << 30}, {"graph_capture": True}], ids=str
)
def test_what_a_device_was_asked_for_does_not_hinder_the_fallback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, int]
) -> None:
    cuda_of_two = dataclasses.replace(cuda.PROVIDER, device_count=lambda: 2)
    monkeypatch.setattr(cuda, "PROVIDER", cuda_of_two)
    config = SessionConfig(provider="cuda", allow_fallback=True, **options)
    session = open_session(tmp_path / "g", config, ort.SessionOptions())
    assert provider_in_use(session) == "cpu"


def test_both_graphs_fall_back_where_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches lie in one place: a prompt on the processor cannot fill those of a device."""
    create = session._create

    def no_room_for_prompts(path: Path, provider: Provider, *more: Any) -> Any:
        if provider.ort_name == "CPUExecutionProvider":
            return create(path, provider, *more)
        if path.name == "prefill.onnx":
            raise RuntimeError("CUDA failure 2: out of memory")
        return SimpleNamespace(get_providers=lambda: [provider.ort_name])

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(_nvidia, "missing", lambda library: None)
    monkeypatch.setattr(session, "_create", no_room_for_prompts)
    model = load(counting_package().path, provider="cuda", allow_fallback=True)
    assert model.provider == "cpu"
    assert model.fallback == "onnxruntime could not open it on CUDAExecutionProvider"
    assert model.generate("AB", max_new_tokens=3).text == "CDE"


@pytest.mark.parametrize("allow_fallback", [False, True])
def test_an_onnxruntime_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, allow_fallback: bool
) -> None:
    """Its loader prints a paragraph on an operator's 17th input."""
    monkeypatch.setattr(ort, "__version__", "1.31.1")
    message = r"^packages of lowering ort need onnxruntime >= 1\.32; found 1\.31\.1; upgrade it, or export "
    with pytest.raises(ProviderError, match=message):
        load(counting_package().path, allow_fallback=allow_fallback)
    with pytest.raises(ProviderError, match=message):
        package_placement(counting_package(), SessionConfig(allow_fallback=allow_fallback))


class Failing:
    """A session whose provider can load a graph and cannot run it."""

    def __init__(self, said: str, provider: str = "CUDAExecutionProvider") -> None:
        self._said = said
        self._provider = provider

    def get_providers(self) -> list[str]:
        return [self._provider, "CPUExecutionProvider"]

    def run_with_iobinding(self, binding: object, options: object) -> None:
        raise RuntimeError(self._said)


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        (
            "CPUExecutionProvider",
            r"^the machine has too little memory for this; found .* : std::bad_alloc; use a smaller package, "
            "fewer rows or a shorter context, or bound keys and values with --kv-budget$",
        ),
        (
            "OpenVINOExecutionProvider",
            "^OpenVINOExecutionProvider has too little memory for this; found .*; use a smaller package, "
            "fewer rows or a shorter context$",
        ),
    ],
)
def test_no_memory_where_there_is_no_limit_to_raise(provider: str, message: str) -> None:
    said = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"
    binding = loaded(counting_package().path).sessions.decode.io_binding()
    with pytest.raises(ProviderError, match=message):
        run_bound(Failing(said, provider), binding)


def test_no_memory_to_open_a_graph_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise RuntimeError("std::bad_alloc")

    monkeypatch.setattr(ort, "InferenceSession", refuse)
    with pytest.raises(ProviderError, match=r"^the machine has too little memory for this; "):
        open_session(tmp_path / "g", SessionConfig(threads=1), ort.SessionOptions())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "Non-zero status code returned while running X.\n no kernel image is available",
            "^CUDAExecutionProvider could load the graph and fails to run it; found Non-zero status code "
            r"returned while running X\. no kernel image is available; try another provider$",
        ),
        (
            # As BFCArena says it.
            "Available memory of 1048576 is smaller than requested bytes of 28311552",
            "^CUDAExecutionProvider has too little memory for this; found Available memory of 1048576 .*; "
            "raise --gpu-mem-limit, or use a smaller package, fewer rows or a shorter context$",
        ),
    ],
)
def test_a_provider_that_fails_on_the_first_run(said: str, message: str) -> None:
    sessions = dataclasses.replace(loaded(counting_package().path).sessions, prefill=Lending(said))
    with pytest.raises(ProviderError, match=message):
        Batch(sessions, 1).prefill_tokens([[1, 2]])


class Lending(Failing):
    """Its binding is a real one."""

    def io_binding(self) -> ort.IOBinding:
        return loaded(counting_package().path).sessions.prefill.io_binding()


def test_a_memory_limit_that_does_not_hold_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Small(Refusing):
        def __init__(self, *arguments: object, **more: object) -> None:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 113246208")

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(_nvidia, "missing", lambda library: None)
    monkeypatch.setattr(ort, "InferenceSession", Small)
    config = SessionConfig(provider="cuda", threads=1, gpu_mem_limit=1 << 20)
    message = (
        "^CUDAExecutionProvider has too little memory for this; found Failed to .* 113246208; raise"
    )
    with pytest.raises(ProviderError, match=message):
        open_session(tmp_path / "g", config, ort.SessionOptions())


class Part:
    """What ONNX Runtime says of nodes that one provider was given."""

    def __init__(self, ep_name: str, *operators: str) -> None:
        self.ep_name = ep_name
        self._operators = operators

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(op_type=operator) for operator in self._operators]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([Part("CUDAExecutionProvider", "MatMul"), Part("CPUExecutionProvider", "Shape")], None),
        (
            [
                Part("CUDAExecutionProvider", "Add"),
                Part("CPUExecutionProvider", "MatMul", "Shape"),
                Part("CPUExecutionProvider", "MatMul", "GroupQueryAttention"),
            ],
            "2 MatMul, 1 GroupQueryAttention run on CPUExecutionProvider",
        ),
    ],
)
def test_nodes_that_a_provider_leaves_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: list[Part], said: str | None
) -> None:
    """QNN on a processor of another maker takes none at all, and is still the first of `get_providers`."""

    class Mixed(Refusing):
        def __init__(self, *arguments: object, **more: object) -> None:
            self._name = "CUDAExecutionProvider"

        def get_provider_graph_assignment_info(self) -> list[Part]:
            return parts

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(_nvidia, "missing", lambda library: None)
    monkeypatch.setattr(ort, "InferenceSession", Mixed)
    config = SessionConfig(provider="cuda", threads=1)
    options = ort.SessionOptions()
    if said is None:
        assert provider_in_use(open_session(tmp_path / "g", config, options)) == "cuda"
        return
    with pytest.raises(ProviderError, match=f"^asked for CUDAExecutionProvider, {said}; mend the"):
        open_session(tmp_path / "g", config, options)
    allowed = SessionConfig(provider="cuda", threads=1, allow_fallback=True)
    session = open_session(tmp_path / "g", allowed, options)
    assert left_to_cpu(session, cuda.PROVIDER) == said
