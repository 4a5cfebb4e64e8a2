"""The sessions of a package on the provider that is asked for, or the reason for another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnxruntime as ort

from onnxlm import io_spec
from onnxlm.errors import InputError
from onnxlm.manifest import Manifest
from onnxlm.package import Package
from onnxlm.runtime.device_buffers import HOST, Device
from onnxlm.runtime.prepacked import PreparedGraphs, open_files, open_graphs, own_files
from onnxlm.runtime.providers import find_provider
from onnxlm.runtime.session import (
    SessionConfig,
    left_to_cpu,
    on_cpu,
    provider_in_use,
    usable_provider,
)
from onnxlm.runtime.sessions import Sessions


@dataclass(frozen=True)
class Opened:
    """What `open_sessions` gives.

    Attributes:
        sessions: The sessions.
        fallback: Why they are not, or not wholly, on the provider that was asked for; None when they are.
    """

    sessions: Sessions
    fallback: str | None


def open_sessions(package: Package, config: SessionConfig, packed: bool = True) -> Opened:
    """Open a package's graphs.

    Args:
        package: The package.
        config: Provider, device, threads.
        packed: See `onnxlm.runtime.load`.

    Raises:
        InputError: Steps of the package cannot be recorded.
        ProviderError: As `check_runs` and `open_session` raise it.
        PackageError: ONNX Runtime cannot load a graph.
    """
    manifest = package.manifest
    check_runs(manifest, config)
    if config.graph_capture and any(state.update != "in_place" for state in manifest.states):
        raise InputError(
            "a decode step of this package has another shape each time and cannot be recorded",
            found=f"lowering {manifest.lowering}",
            allowed="lowering ort",
        )
    graphs = _open(package, config, packed)
    if len({provider_in_use(session) for session in graphs.values()}) > 1:
        graphs = _open(package, on_cpu(config), packed)  # their caches are in one place
    decode = graphs[io_spec.DECODE]
    used = provider_in_use(decode)
    sessions = Sessions(
        prefill=graphs[io_spec.PREFILL],
        decode=decode,
        states=manifest.states,
        vocab_size=manifest.vocab_size,
        context_length=manifest.context_length,
        device=_device(used, config),
        graph_capture=config.graph_capture and used == config.provider,
    )
    return Opened(sessions, _fallback(sessions, config.provider, used))


def _open(
    package: Package, config: SessionConfig, packed: bool
) -> Mapping[str, ort.InferenceSession]:
    if packed:
        return open_graphs(package, config)[0]
    return open_files(PreparedGraphs(own_files(package), cached=False), config)


def check_runs(manifest: Manifest, config: SessionConfig) -> None:
    """Refuse a package that what is asked for does not run; nothing is opened.

    Args:
        manifest: Of the package.
        config: Provider, and whether the CPU may stand in for it.

    Raises:
        ProviderError: The provider is not known or not available, does not run such packages, or the
            installed ONNX Runtime is too old for them.
    """
    name = usable_provider(config)
    provider = find_provider(name)
    if not config.allow_fallback:
        provider.check_package(name, manifest)
    provider.check_version(manifest)  # on the CPU too: it comes with the same ONNX Runtime


def _device(used: str, config: SessionConfig) -> Device:
    kind = find_provider(used).device
    if kind == HOST.kind:
        return HOST
    return Device(kind, config.device_id, config.gpu_mem_limit)


def _fallback(sessions: Sessions, asked: str, used: str) -> str | None:
    provider = find_provider(asked)
    if used != asked:
        return provider.unavailable() or f"onnxruntime could not open it on {provider.ort_name}"
    for name, session in (("prefill", sessions.prefill), ("decode", sessions.decode)):
        left = left_to_cpu(session, provider)
        if left is not None:
            return f"in {name}, {left}"
    return None
