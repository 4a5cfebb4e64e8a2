"""Execution providers in packages of their own, which ONNX Runtime loads when it is told where they are."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

# A GPU before an NPU before the CPU, which ONNX Runtime runs well by itself.
_ORDER = ("GPU", "NPU", "CPU")


@dataclass(frozen=True)
class Plugin:
    """A Python package that brings an execution provider.

    Attributes:
        module: Its import name; has `get_library_path()`.
        wheel: Its name on PyPI.
    """

    module: str
    wheel: str

    def problem(self, ort_name: str) -> str | None:
        """Why the provider cannot be had from here; None when it can. Loads its library once a process."""
        if importlib.util.find_spec(self.module) is None:
            return f"the plugin package {self.wheel} is not installed"
        failure = _register(ort_name, self.module)
        if failure is not None:
            return f"the plugin package {self.wheel} cannot be loaded: {failure}"
        if not self.devices(ort_name):
            return f"the plugin package {self.wheel} finds no device that it can use"
        return None

    def devices(self, ort_name: str) -> list[Any]:
        """The registered provider's devices (`OrtEpDevice`), the most capable kind first."""
        found = [device for device in ort.get_ep_devices() if device.ep_name == ort_name]
        return sorted(found, key=lambda device: _ORDER.index(device.device.type.name))


@functools.cache
def _register(ort_name: str, module: str) -> str | None:
    """Load a plugin under the provider's own name; what went wrong, or None."""
    try:
        library = importlib.import_module(module).get_library_path()
        ort.register_execution_provider_library(ort_name, str(library))
    except Exception as error:  # whatever the package or its library raise
        return " ".join(str(error).split())
    return None
