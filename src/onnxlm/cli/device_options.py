"""Options of every command that opens a package: what it may take of a device, and how steps run there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from onnxlm.runtime.providers import Provider

# What a provider must say that it accepts, by the name of the option.
_REQUESTS = {
    "device_id": "device_id",
    "gpu_mem_limit": "memory_limit",
    "graph_capture": "graph_capture",
}


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """Which device, and how much of it."""

    device_id: Annotated[int, typer.Option(help="Number of the provider's device.")] = 0
    gpu_mem_limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Most memory of the device for weights and work, as 4GB."
        ),
    ] = None

    @property
    def memory_limit(self) -> int:
        """`gpu_mem_limit` in bytes; 0 for none.

        Raises:
            InputError: It is no number of bytes.
        """
        from onnxlm.runtime.memory_budget import read_bytes

        return read_bytes(self.gpu_mem_limit, "gpu_mem_limit") or 0


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(DeviceChoice):
    """The same, and how much keys and values may take."""

    kv_budget: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Most memory of keys and values, as 512MB."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(PlaceOptions):
    """The same, and how decode steps run."""

    graph_capture: Annotated[
        bool,
        typer.Option("--graph-capture", help="Record a decode step once and replay it (CUDA)."),
    ] = False

    def device_fields(self, providers: Sequence[str]) -> dict[str, Any]:
        """Those that were given, by the names of `onnxlm.runtime.load`; numbers of bytes in full.

        Args:
            providers: Those that are measured.

        Raises:
            InputError: A number of bytes is none.
            ProviderError: None of the providers has what was asked for.
        """
        from onnxlm.runtime.memory_budget import read_bytes
        from onnxlm.runtime.providers import find_provider
        from onnxlm.runtime.session import SessionConfig

        given = {
            "kv_budget": read_bytes(self.kv_budget),
            "device_id": self.device_id,
            "gpu_mem_limit": self.memory_limit,
            "graph_capture": self.graph_capture,
        }
        fields = {name: value for name, value in given.items() if value}
        found = [find_provider(name) for name in providers]
        for option in _REQUESTS.keys() & fields.keys():
            asked: dict[str, Any] = {option: fields[option]}
            request = SessionConfig(**asked).request
            if not any(accepted(provider, asked) for provider in found):
                found[0].check_request(providers[0], request)
        return fields


def accepted(provider: Provider, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a provider carries out: the CPU beside a GPU runs without those of the GPU."""
    return {
        name: value
        for name, value in fields.items()
        if name not in _REQUESTS or _REQUESTS[name] in provider.accepted()
    }
