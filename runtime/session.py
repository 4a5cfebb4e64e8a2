"""An ONNX Runtime session that runs on the provider asked for, and says so when it does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime as ort

from onnxlm.errors import PackageError, ProviderError
from onnxlm.runtime.providers import find_provider, provider_names, require_provider
from onnxlm.runtime.saturation import products_saturate

_ERRORS_ONLY = 3


@dataclass(frozen=True)
class SessionConfig:
    """What a user chooses about sessions.

    Attributes:
        provider: Name of a file in `runtime/providers/`.
        device_id: Which device of that provider.
        threads: Threads inside one operator; 0 means every core this process may use.
        allow_fallback: Let nodes, or the whole graph, run on the CPU instead.
        options: More session config entries, by ONNX Runtime's key.
    """

    provider: str = "cpu"
    device_id: int = 0
    threads: int = 0
    allow_fallback: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


def usable_cores() -> int:
    """Cores that the process may run on: its affinity where the platform tells, else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def session_options(config: SessionConfig) -> ort.SessionOptions:
    """Options for one session of a package."""
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = config.threads or usable_cores()
    if products_saturate():
        options.add_session_config_entry("session.x64quantprecision", "1")
    for key, value in config.options.items():
        options.add_session_config_entry(key, value)
    return options


def open_session(
    path: Path, config: SessionConfig, options: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    """Open a graph file.

    Args:
        path: The .onnx file; its weights are found beside it.
        config: Provider and threads.
        options: Prepared session options; made from `config` when None.

    Raises:
        ProviderError: The provider is not known, not available, or not the one that the session got.
        PackageError: ONNX Runtime cannot load the file.
    """
    if config.allow_fallback:
        provider = find_provider(config.provider)
        usable = provider if provider.unavailable() is None else find_provider("cpu")
    else:
        usable = require_provider(config.provider)
    chosen = (usable.ort_name, dict(usable.options(config.device_id)))
    try:
        session = ort.InferenceSession(
            str(path), options or session_options(config), providers=[chosen]
        )
    except Exception as error:  # onnxruntime raises its own classes, one a status code
        raise PackageError(f"{path}: onnxruntime cannot load it", found=str(error)) from error
    active = session.get_providers()
    if active[0] != usable.ort_name and not config.allow_fallback:
        raise ProviderError(
            f"asked for {usable.ort_name}, the session runs on {', '.join(active)}",
            fix="use --allow-fallback to accept that",
        )
    return session


def device_of(session: ort.InferenceSession, device_id: int) -> tuple[str, int]:
    """Device type and number of the buffers that the session reads, by the provider it really runs on."""
    active = session.get_providers()[0]
    devices = [p.device for p in map(find_provider, provider_names()) if p.ort_name == active]
    return (devices[0], device_id) if devices and devices[0] != "cpu" else ("cpu", 0)
