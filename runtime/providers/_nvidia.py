"""What NVIDIA's driver and libraries on this machine can do, asked without a session."""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
import sys
from pathlib import Path

import onnxruntime as ort


def missing(provider_library: str) -> str | None:
    """Why a provider of the CUDA family cannot work here; None when nothing is known against it.

    Builds of ONNX Runtime list the provider on machines without a driver or CUDA too, and a session then
    silently runs on the CPU.

    Args:
        provider_library: Name of the shared library in the wheel, without prefix and ending.
    """
    driver = driver_name()
    try:
        library = ctypes.CDLL(driver)
    except OSError:
        return f"the NVIDIA driver library {driver} cannot be loaded"
    if device_count(library) == 0:
        return "the NVIDIA driver finds no device"
    lacking = missing_libraries(provider_library)
    if lacking:
        return f"these libraries of CUDA cannot be loaded: {', '.join(lacking)}"
    return None


def driver_name() -> str:
    """The driver's library on this system."""
    return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def device_count(driver: ctypes.CDLL) -> int:
    """Devices of an opened driver.

    Source: CUDA driver API, cuInit and cuDeviceGetCount.
    """
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def devices() -> int | None:
    """Devices of this machine; None without a driver."""
    try:
        return device_count(ctypes.CDLL(driver_name()))
    except OSError:
        return None


def used_bytes(device_id: int) -> int | None:
    """Bytes of a device's memory that are in use, by whomever; None where the driver does not tell.

    Sessions use the primary context, which is open while the driver is asked: it counts before a session
    and behind it.

    Source: CUDA driver API, cuDevicePrimaryCtxRetain and cuMemGetInfo.

    Args:
        device_id: As CUDA numbers devices.
    """
    try:
        driver = ctypes.CDLL(driver_name())
        return _used_bytes(driver, device_id)
    except (OSError, AttributeError):  # no driver, or one that lacks a function
        return None


def _used_bytes(driver: ctypes.CDLL, device_id: int) -> int | None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), device_id):
        return None
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        if driver.cuCtxPushCurrent_v2(context):
            return None
        told = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)
    return total.value - free.value if told else None


def missing_libraries(provider_library: str) -> list[str]:
    """Names of the libraries that ONNX Runtime cannot load; loads those that can be."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # it tells what it lacks by printing it
        ort.preload_dlls()
    named = [Path(path).name for path in re.findall(r"Failed to load (.+?): ", said.getvalue())]
    if not named and sys.platform != "win32":
        named = _unresolved(provider_library)
    return list(dict.fromkeys(named))


def _unresolved(provider_library: str) -> list[str]:
    """The library that the loader of a Unix system stops at: preloading leaves cuDNN and TensorRT out."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / f"libonnxruntime_providers_{provider_library}.so"))
    except OSError as error:
        return [str(error).partition(":")[0]]
    return []
