"""Memory of a device that is in use: a driver that stands in for CUDA's, and the way into a report."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from support.contestants import spec
from support.runtime_models import hot_package

from onnxlm.runtime import bench_footprint
from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_package import PackageContestant
from onnxlm.runtime.memory import Memory
from onnxlm.runtime.providers import _nvidia, cuda, find_provider

TOTAL, FREE = 24 << 30, 20 << 30


class Driver:
    """libcuda of a machine with two devices, as ctypes opens it; notes what is open.

    Args:
        fails: The function that fails.
    """

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.retained: list[int] = []
        self.pushed = 0

    def __call__(self, name: str) -> Driver:
        return self

    def _code(self, name: str) -> int:
        return 999 if name == self.fails else 0

    def cuInit(self, flags: int) -> int:  # noqa: N802  the driver's names
        return self._code("cuInit")

    def cuDeviceGet(self, device: ctypes._CData, number: int) -> int:  # noqa: N802
        device._obj.value = number + 40  # type: ignore[attr-defined]
        return self._code("cuDeviceGet") if number < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: ctypes._CData, device: ctypes.c_int) -> int:  # noqa: N802
        if self._code("cuDevicePrimaryCtxRetain"):
            return 999
        self.retained.append(device.value)
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:  # noqa: N802
        self.retained.remove(device.value)
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.pushed += not self._code("cuCtxPushCurrent_v2")
        return self._code("cuCtxPushCurrent_v2")

    def cuCtxPopCurrent_v2(self, context: ctypes._CData) -> int:  # noqa: N802
        self.pushed -= 1
        return 0

    def cuMemGetInfo_v2(self, free: ctypes._CData, total: ctypes._CData) -> int:  # noqa: N802
        assert self.retained == [41]
        assert self.pushed == 1
        free._obj.value, total._obj.value = FREE, TOTAL  # type: ignore[attr-defined]
        return self._code("cuMemGetInfo_v2")


def test_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", driver)
    assert find_provider("cuda").device_used(1) == TOTAL - FREE
    assert (driver.retained, driver.pushed) == ([], 0)
    assert _nvidia.used_bytes(2) is None, "there are two"


@pytest.mark.parametrize(
    "fails",
    [
        "cuInit",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemGetInfo_v2",
    ],
)
def test_a_driver_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(ctypes, "CDLL", driver)
    assert _nvidia.used_bytes(1) is None
    assert (driver.retained, driver.pushed) == ([], 0)


def test_no_driver_and_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvidia, "driver_name", lambda: "no-such-library.so")
    assert _nvidia.used_bytes(0) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert _nvidia.used_bytes(0) is None


def test_a_contestant_asks_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def used(number: int) -> int:
        asked.append(number)
        return 7

    monkeypatch.setattr(cuda, "PROVIDER", replace(cuda.PROVIDER, device_used=used))
    path = str(hot_package().path)
    assert PackageContestant(path, "cuda", options={"device_id": 1}).device_used() == 7
    assert PackageContestant(path, "cuda").device_used() == 7
    assert asked == [1, 0]
    assert PackageContestant(path).device_used() is None, "the processor's own memory has figures"


@pytest.mark.parametrize(
    ("before", "behind", "expected"),
    [(2, 9, 7), (None, 9, None), (2, None, None), (None, None, None)],
)
def test_a_footprint_has_what_came_to_be_in_use(
    monkeypatch: pytest.MonkeyPatch, before: int | None, behind: int | None, expected: int | None
) -> None:
    told = iter([Memory(1, 1, device_bytes=before), Memory(1, 1, device_bytes=behind)])
    monkeypatch.setattr(bench_footprint.Child, "memory", lambda self: next(told))
    found = bench_footprint.measure_footprint(spec("a"), [[1] * 8], Case(4, 2), loads=1)
    assert found.device_bytes == expected
