"""Execution providers: each file, why one is missing, and that a name is a file's name."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.machinery
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort
import pytest

from onnxlm.errors import ProviderError
from onnxlm.manifest import LOWERINGS, PRECISIONS
from onnxlm.runtime.providers import (
    DeviceRequest,
    Provider,
    _plugin,
    find_provider,
    provider_names,
    require_provider,
)

# A fake answer of ONNX Runtime: its wheel lists what it was built with, whether or not the machine has it.
EVERYTHING = ["CUDAExecutionProvider", "OpenVINOExecutionProvider", "CPUExecutionProvider"]


def test_names() -> None:
    built_in = {"cpu", "cuda", "tensorrt", "coreml", "directml", "migraphx", "xnnpack"}
    plugins = {"openvino", "webgpu", "qnn", "nv_tensorrt_rtx"}
    assert set(provider_names()) == built_in | plugins
    assert {name for name in provider_names() if find_provider(name).plugin} == plugins


@pytest.mark.parametrize("name", provider_names())
def test_each_file_describes_a_provider_of_onnxruntime(name: str) -> None:
    provider = find_provider(name)
    known = ort.get_all_providers()
    assert provider.ort_name in known or provider.plugin is not None
    assert re.search('pip install "?onnxruntime', provider.install) or provider.wheel is None
    assert provider.install
    assert provider.device in ("cpu", "cuda")
    assert set(provider.systems) <= {"linux", "win32", "darwin"}
    assert set(provider.precisions) <= set(PRECISIONS)
    assert "fp32" in provider.precisions
    assert set(provider.lowerings) <= set(LOWERINGS)
    assert set(provider.activations) <= set(provider.lowerings)
    assert set(provider.accepts) <= {field.name for field in dataclasses.fields(DeviceRequest)}
    for other in provider.backed_by:
        assert find_provider(other).device == provider.device


@pytest.mark.parametrize("name", provider_names())
def test_options_carry_what_is_asked_and_accepted(name: str) -> None:
    provider = find_provider(name)
    options = provider.options(DeviceRequest(3, 5_000_000_000, True))
    assert all(isinstance(value, str) for pair in options.items() for value in pair)
    if "device_id" in options:
        assert (options["device_id"], "device_id" in provider.accepts) == ("3", True)
    assert ("5000000000" in options.values()) == ("memory_limit" in provider.accepts)
    plain = provider.options(DeviceRequest())
    captures = {k: v for k, v in options.items() if k not in plain and v == "1"}
    assert bool(captures) == ("graph_capture" in provider.accepts)


def test_options_of_cuda() -> None:
    """Names by ONNX Runtime's CUDA execution provider documentation."""
    cuda = find_provider("cuda")
    plain = {"device_id": "0", "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
    assert cuda.options(DeviceRequest()) == plain
    assert cuda.options(DeviceRequest(1, 2**31, True)) == {
        **plain,
        "device_id": "1",
        "gpu_mem_limit": "2147483648",
        "enable_cuda_graph": "1",
    }


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


class Driver:
    """libcuda of a machine with so many devices; opened by name, as ctypes opens it."""

    def __init__(self, devices: int, absent: tuple[str, ...] = ()) -> None:
        self._devices = devices
        self._absent = absent

    def __call__(self, name: str, mode: int = 0) -> Driver:
        if any(absent in name for absent in self._absent):
            said = "cannot open shared object file: No such file or directory"
            raise OSError(f"{Path(name).name}: {said}")
        return self

    def cuInit(self, flags: int) -> int:  # noqa: N802  the driver's name
        return 0 if self._devices else 100

    def cuDeviceGetCount(self, count: ctypes._CData) -> int:  # noqa: N802
        count._obj.value = self._devices  # type: ignore[attr-defined]
        return 0


def machine(
    monkeypatch: pytest.MonkeyPatch,
    devices: int = 1,
    absent: tuple[str, ...] = (),
    printed: str = "",
) -> None:
    """A Linux machine with a build of ONNX Runtime for CUDA."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: EVERYTHING)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", Driver(devices, absent))
    monkeypatch.setattr(ort, "preload_dlls", lambda: print(printed, end=""))


@pytest.mark.parametrize(
    ("devices", "absent", "printed", "reason"),
    [
        (1, ("libcuda.so.1",), "", "the NVIDIA driver library libcuda.so.1 cannot be loaded"),
        (0, (), "", "the NVIDIA driver finds no device"),
        (
            1,
            (),
            # As onnxruntime-gpu 1.31 prints it.
            "Failed to load libcublasLt.so.13: libcublasLt.so.13: cannot open shared object file: No such "
            "file or directory\nFailed to load libcurand.so.10: libcurand.so.10: cannot open\n"
            "Please follow https://onnxruntime.ai/docs/install/#cuda-and-cudnn to install CUDA.\n",
            "these libraries of CUDA cannot be loaded: libcublasLt.so.13, libcurand.so.10",
        ),
        (
            1,
            ("providers_cuda",),
            "",
            "these libraries of CUDA cannot be loaded: libonnxruntime_providers_cuda.so",
        ),
    ],
)
def test_what_cuda_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: int,
    absent: tuple[str, ...],
    printed: str,
    reason: str,
) -> None:
    machine(monkeypatch, devices, absent, printed)
    with pytest.raises(
        ProviderError, match=f"^execution provider 'cuda' cannot be used: {reason}; "
    ):
        require_provider("cuda")
    assert capsys.readouterr().out == ""  # the text that a model gives goes there


def test_a_machine_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, devices=2)
    cuda = require_provider("cuda")
    cuda.check_request("cuda", DeviceRequest(1))
    with pytest.raises(
        ProviderError,
        match=r"^execution provider 'cuda' has no such device; found 2; allowed: 0 to 1$",
    ):
        cuda.check_request("cuda", DeviceRequest(2))


@pytest.mark.parametrize(
    ("request_", "words", "those"),
    [
        (DeviceRequest(device_id=1), "device id", "cuda, "),
        (DeviceRequest(memory_limit=1), "memory limit", "cuda, nv_tensorrt_rtx, tensorrt"),
        (DeviceRequest(graph_capture=True), "graph capture", "cuda"),
    ],
)
def test_what_a_provider_cannot_carry_out(request_: DeviceRequest, words: str, those: str) -> None:
    message = f"^execution provider 'cpu' has no {words}; allowed: providers that have: {those}"
    with pytest.raises(ProviderError, match=message):
        find_provider("cpu").check_request("cpu", request_)


def test_the_wheel_to_install_is_new_enough_for_the_lowering() -> None:
    assert 'pip install "onnxruntime-gpu>=1.32" ' in find_provider("cuda").install
    assert "pip install onnxruntime-gpu " in find_provider("tensorrt").install  # does not run it


def test_the_device_number_of_a_build_with_webgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the plugin's list of devices; a build without the plugin has none."""
    webgpu = find_provider("webgpu")
    second = DeviceRequest(device_id=1)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["WebGpuExecutionProvider"])
    message = (
        "^execution provider 'webgpu' has no device id; allowed: providers that have: .*; take its plugin: "
        "pip install onnxruntime-ep-webgpu$"
    )
    with pytest.raises(ProviderError, match=message) as raised:
        webgpu.check_request("webgpu", second)
    assert str(raised.value).count("webgpu") == 2  # not among those that have one
    webgpu.check_request("webgpu", DeviceRequest())
    found = [EpDevice(webgpu.ort_name, Hardware(Kind("GPU")))] * 2
    monkeypatch.setattr(ort, "get_ep_devices", lambda: found)
    webgpu.check_request("webgpu", second)


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str


@dataclasses.dataclass(frozen=True)
class Hardware:
    type: Kind


@dataclasses.dataclass(frozen=True)
class EpDevice:
    """What ONNX Runtime tells of a plugin's device."""

    ep_name: str
    device: Hardware


def plugin_machine(
    monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str], error: str | None = None
) -> list[str]:
    """A machine with a plugin package that finds such devices; returns the names it gets registered by."""
    registered: list[str] = []

    def register(name: str, library: str) -> None:
        assert library == "/somewhere/fake.so"
        if error is not None:
            raise RuntimeError(error)
        registered.append(name)

    module = types.ModuleType("fake_plugin")
    module.__spec__ = importlib.machinery.ModuleSpec("fake_plugin", None)
    module.get_library_path = lambda: "/somewhere/fake.so"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_plugin", module)
    monkeypatch.setattr(ort, "register_execution_provider_library", register)
    monkeypatch.setattr(
        ort,
        "get_ep_devices",
        lambda: [EpDevice(n, Hardware(Kind(k))) for n in registered for k in kinds],
    )
    _plugin._register.cache_clear()
    return registered


FAKE = Provider(
    "FakeExecutionProvider", plugin=_plugin.Plugin("fake_plugin", "onnxruntime-ep-fake")
)
LACKING = f"the installed onnxruntime {ort.__version__} has no FakeExecutionProvider, and the plugin package "


def test_a_plugin_that_is_not_installed() -> None:
    provider = Provider("FakeExecutionProvider", plugin=_plugin.Plugin("no_such_plugin", "a-wheel"))
    assert provider.unavailable() == f"{LACKING}a-wheel is not installed"
    assert provider.install == "pip install a-wheel"


def test_a_plugin_is_registered_once_and_its_best_device_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered = plugin_machine(monkeypatch, ["CPU", "NPU", "GPU"])
    assert FAKE.unavailable() is None
    assert FAKE.unavailable() is None
    assert registered == ["FakeExecutionProvider"]
    assert FAKE.plugin is not None
    kinds = [found.device.type.name for found in FAKE.plugin.devices(FAKE.ort_name)]
    assert kinds == ["GPU", "NPU", "CPU"]
    accepting = dataclasses.replace(FAKE, accepts=("device_id",))
    accepting.check_request("fake", DeviceRequest(2))
    with pytest.raises(ProviderError, match=r"no such device; found 3; allowed: 0 to 2$"):
        accepting.check_request("fake", DeviceRequest(3))


@pytest.mark.parametrize(
    ("kinds", "error", "reason"),
    [
        ([], None, "onnxruntime-ep-fake finds no device that it can use"),
        (
            ["GPU"],
            "libx.so:\n not found",
            "onnxruntime-ep-fake cannot be loaded: libx.so: not found",
        ),
    ],
)
def test_a_plugin_that_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], error: str | None, reason: str
) -> None:
    plugin_machine(monkeypatch, kinds, error)
    assert FAKE.unavailable() == f"{LACKING}{reason}"
