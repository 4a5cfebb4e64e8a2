"""Execution providers: each file, why one is missing, and that a name is a file's name."""

from __future__ import annotations

import ctypes
import re
import sys

import onnxruntime as ort
import pytest

from onnxlm.errors import ProviderError
from onnxlm.runtime.providers import Provider, find_provider, provider_names, require_provider

# A fake answer of ONNX Runtime: its wheel lists what it was built with, whether or not the machine has it.
EVERYTHING = ["CUDAExecutionProvider", "OpenVINOExecutionProvider", "CPUExecutionProvider"]


def test_names() -> None:
    assert {"cpu", "cuda", "coreml", "directml", "openvino"} <= set(provider_names())


@pytest.mark.parametrize("name", provider_names())
def test_each_file_describes_a_provider_of_onnxruntime(name: str) -> None:
    provider = find_provider(name)
    assert provider.ort_name in ort.get_all_providers()
    assert "pip install onnxruntime" in provider.install
    assert provider.device in ("cpu", "cuda")
    assert set(provider.systems) <= {"linux", "win32", "darwin"}
    options = provider.options(3)
    assert all(isinstance(value, str) for pair in options.items() for value in pair)
    if "device_id" in options:
        assert options["device_id"] == "3"


def test_each_provider_is_in_one_file() -> None:
    names = [find_provider(name).ort_name for name in provider_names()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", provider_names())
def test_available_or_a_reason_and_what_to_do(name: str) -> None:
    provider = find_provider(name)
    if provider.ort_name in ort.get_available_providers() and provider.missing() is None:
        assert require_provider(name) is provider
        return
    with pytest.raises(ProviderError) as raised:
        require_provider(name)
    reason = provider.unavailable()
    assert str(raised.value) == (
        f"execution provider '{name}' cannot be used: {reason}; {provider.install}"
    )


def test_the_cpu_is_always_there() -> None:
    assert find_provider("cpu").unavailable() is None


@pytest.mark.parametrize("name", ["cdua", "CPU", "CPUExecutionProvider", "", "../cpu", "__init__"])
def test_a_name_that_is_no_file(name: str) -> None:
    allowed = ", ".join(provider_names())
    message = f"execution provider is not known; found {name!r}; allowed: {allowed}"
    with pytest.raises(ProviderError, match=f"^{re.escape(message)}$"):
        find_provider(name)


def test_the_wheel_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    provider = Provider("CUDAExecutionProvider", "pip install")
    assert provider.unavailable() == (
        f"the installed onnxruntime {ort.__version__} has no CUDAExecutionProvider"
    )


def test_the_system_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: EVERYTHING)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert find_provider("directml").unavailable() == "DmlExecutionProvider exists on Windows only"
    assert find_provider("openvino").unavailable() == (
        "OpenVINOExecutionProvider exists on Linux and Windows only"
    )
    monkeypatch.setattr(sys, "platform", "linux")
    assert find_provider("openvino").unavailable() is None


def test_the_wheel_has_cuda_and_the_machine_has_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ort, "get_available_providers", lambda: EVERYTHING)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", load)
    reason = "the NVIDIA driver library libcuda.so.1 cannot be loaded"
    assert find_provider("cuda").unavailable() == reason
    with pytest.raises(ProviderError, match=f"'cuda' cannot be used: {reason}; pip uninstall"):
        require_provider("cuda")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    assert find_provider("cuda").unavailable() is None
