"""Execution providers, one file each: `PROVIDER` says what it is called, needs, and why it is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort

from onnxlm.errors import ProviderError
from onnxlm.plugins import Registry

_SYSTEMS = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}


@dataclass(frozen=True)
class Provider:
    """One execution provider of ONNX Runtime.

    Attributes:
        ort_name: Its name in ONNX Runtime.
        install: What to do to get it.
        device: Device type of its buffers, as OrtValue spells it.
        systems: Values of `sys.platform` where it exists; everywhere when empty.
        options: Device number -> provider options.
        missing: Why it cannot work here although the wheel has it; None when nothing is known against it.
    """

    ort_name: str
    install: str
    device: str = "cpu"
    systems: tuple[str, ...] = ()
    options: Callable[[int], Mapping[str, Any]] = field(default=lambda device_id: {})
    missing: Callable[[], str | None] = field(default=lambda: None)

    def unavailable(self) -> str | None:
        """Why this provider cannot be used in this process; None when it can."""
        if self.systems and sys.platform not in self.systems:
            names = " and ".join(_SYSTEMS[system] for system in self.systems)
            return f"{self.ort_name} exists on {names} only"
        if self.ort_name not in ort.get_available_providers():
            return f"the installed onnxruntime {ort.__version__} has no {self.ort_name}"
        return self.missing()


_PROVIDERS = Registry(
    __name__, "PROVIDER", Provider, "execution provider is not known", ProviderError
)


def provider_names() -> list[str]:
    """Names a user may ask for."""
    return _PROVIDERS.names()


def find_provider(name: str) -> Provider:
    """The provider in file `name`, whether or not it is available.

    Raises:
        ProviderError: There is no such file.
    """
    return _PROVIDERS.find(name)


def require_provider(name: str) -> Provider:
    """The provider in file `name`, which must be available.

    Raises:
        ProviderError: It is not known, or not available; says why and how to get it.
    """
    provider = find_provider(name)
    reason = provider.unavailable()
    if reason is not None:
        raise ProviderError(
            f"execution provider '{name}' cannot be used: {reason}", fix=provider.install
        )
    return provider
