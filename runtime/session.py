"""An ONNX Runtime session that runs on the provider asked for, and says so when it does not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime as ort

from onnxlm.errors import InputError, PackageError, ProviderError
from onnxlm.runtime.providers import find_provider, provider_names, require_provider
from onnxlm.runtime.saturation import products_saturate

_ERRORS_ONLY = 3
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class SessionConfig:
    """What a user chooses about sessions.

    Attributes:
        provider: Name of a file in `runtime/providers/`.
        device_id: Which device of that provider.
        threads: Threads inside one operator; 0 means every core this process may use.
        allow_fallback: Let nodes, or the whole graph, run on the CPU instead.
        options: More session config entries, by ONNX Runtime's key.

    Raises:
        InputError: The number of threads is negative.
    """

    provider: str = "cpu"
    device_id: int = 0
    threads: int = 0
    allow_fallback: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise InputError("threads", found=self.threads, allowed="0 (all cores) or more")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Cores that the process may keep busy: its affinity where the platform tells, and a container's quota.

    Args:
        cgroups: Where Linux shows the quota of the process's own container.
    """
    told = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if told else os.cpu_count() or 1
    quota = _quota(cgroups)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota(cgroups: Path) -> float | None:
    """Cores' worth of time that a container is given; None without a limit."""
    try:
        limit, period = (cgroups / "cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):  # no container, or the first version of cgroups
        pass
    try:
        limit, period = (
            (cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii")
            for name in ("quota", "period")
        )
        return None if int(limit) < 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None


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
    options = options or session_options(config)
    try:
        # ONNX Runtime's own fallback prints to standard output and goes on in silence.
        session = ort.InferenceSession(str(path), options, providers=[chosen], enable_fallback=0)
    except Exception as error:  # onnxruntime raises its own classes, one a status code
        if config.allow_fallback and usable != find_provider("cpu"):
            return open_session(path, dataclasses.replace(config, provider="cpu"), options)
        raise PackageError(
            f"{path}: onnxruntime cannot load it on {usable.ort_name}", found=str(error)
        ) from error
    active = session.get_providers()
    if active[0] != usable.ort_name and not config.allow_fallback:
        raise ProviderError(
            f"asked for {usable.ort_name}, the session runs on {', '.join(active)}",
            fix=f"mend the installation ({usable.install}), or use --allow-fallback to accept that",
        )
    return session


def provider_in_use(session: ort.InferenceSession) -> str:
    """Name of the provider file for what a session really runs on."""
    active = session.get_providers()[0]
    return next(name for name in provider_names() if find_provider(name).ort_name == active)
