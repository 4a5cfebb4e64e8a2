"""An ONNX Runtime session that runs on the provider asked for, and says so when it does not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime as ort

from onnxlm.errors import InputError, PackageError, ProviderError
from onnxlm.runtime.cores import usable_cores
from onnxlm.runtime.providers import (
    DeviceRequest,
    Provider,
    find_provider,
    provider_names,
    require_provider,
)
from onnxlm.runtime.saturation import products_saturate

_ERRORS_ONLY, _FATAL_ONLY, _WARNINGS = 3, 4, 2
_CPU = "CPUExecutionProvider"
# Operators whose work grows with the weights or the context: a provider that leaves them has done nothing.
HEAVY = frozenset(
    {
        *("Attention", "GroupQueryAttention", "LinearAttention", "MultiHeadAttention"),
        *("Conv", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MoE"),
        *("DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QMoE"),
    }
)
_RECORD = "session.record_ep_graph_assignment_info"
# Threads wait awake for the next operator so long, also from step to step, and then sleep. By default it is
# some 50 ms: a call of the other session meets them on the cores it wants, and a core burns for nothing.
_SPIN_US = 300
# Attention over tiles of the keys ("flash") takes less memory, which the size of a call bounds as well, and
# more time: prompts of 128 to 2048 tokens take 5 to 20% less without. The only switch is one of the process.
_NO_TILES = ("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")
_NO_MEMORY = re.compile(
    r"smaller than requested bytes|failed to allocate memory|out of memory|bad_alloc", re.IGNORECASE
)


@dataclass(frozen=True)
class SessionConfig:
    """What a user chooses about sessions.

    Attributes:
        provider: Name of a file in `runtime/providers/`.
        device_id: Which device of that provider.
        threads: Threads inside one operator; 0 means every core this process may use.
        allow_fallback: Let nodes, or the whole graph, run on the CPU instead.
        options: More session config entries, by ONNX Runtime's key.
        gpu_mem_limit: Most bytes of the device's memory; 0 is no limit.
        graph_capture: Let the device record a decode step once and replay it.

    Raises:
        InputError: A number is negative.
    """

    provider: str = "cpu"
    device_id: int = 0
    threads: int = 0
    allow_fallback: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    gpu_mem_limit: int = 0
    graph_capture: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("threads", "0 (all cores) or more"),
            ("device_id", "0 or more"),
            ("gpu_mem_limit", "0 (no limit) or more bytes"),
        ):
            if getattr(self, name) < 0:
                raise InputError(name, found=getattr(self, name), allowed=allowed)

    @property
    def request(self) -> DeviceRequest:
        """What is asked of the provider's device."""
        return DeviceRequest(self.device_id, self.gpu_mem_limit, self.graph_capture)


def session_options(config: SessionConfig) -> ort.SessionOptions:
    """Options for one session of a package."""
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = config.threads or usable_cores()
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
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
    name = usable_provider(config)
    provider = find_provider(name)
    provider.check_request(name, config.request if name == config.provider else DeviceRequest())
    options = options or session_options(config)
    if provider.ort_name != _CPU:
        options.add_session_config_entry(_RECORD, "1")
    try:
        session = _create(path, provider, config, options)
    except Exception as error:  # onnxruntime raises its own classes, one a status code
        if config.allow_fallback and name != "cpu":
            return open_session(path, on_cpu(config), options)
        raise _load_error(path, provider, error) from error
    left = left_to_cpu(session, provider)
    if left is not None and not config.allow_fallback:
        raise ProviderError(
            f"asked for {provider.ort_name}, {left}",
            fix=f"mend the installation ({provider.install}), or use --allow-fallback to accept that",
        )
    return session


def usable_provider(config: SessionConfig) -> str:
    """Name of the provider file to try: the one asked for, or the CPU's where it may fall back and has to.

    Raises:
        ProviderError: It is not known, or not available and may not fall back.
    """
    if not config.allow_fallback:
        require_provider(config.provider)
    elif find_provider(config.provider).unavailable() is not None:
        return "cpu"
    return config.provider


def on_cpu(config: SessionConfig) -> SessionConfig:
    """The same on the CPU, without what only a device could have carried out and the CPU would refuse."""
    return dataclasses.replace(
        config, provider="cpu", device_id=0, gpu_mem_limit=0, graph_capture=False
    )


def _create(
    path: Path, provider: Provider, config: SessionConfig, options: ort.SessionOptions
) -> ort.InferenceSession:
    os.environ.setdefault(*_NO_TILES)  # read when a session is made
    chain = [provider, *(find_provider(name) for name in provider.backed_by)]
    with _quiet(provider):
        if provider.plugin is not None and not provider.built_in():
            device = provider.plugin.devices(provider.ort_name)[config.device_id]
            options.add_provider_for_devices([device], dict(provider.options(config.request)))
            return ort.InferenceSession(str(path), options, enable_fallback=0)
        chosen = [(each.ort_name, dict(each.options(config.request))) for each in chain]
        # ONNX Runtime's own fallback prints to standard output and goes on in silence.
        return ort.InferenceSession(str(path), options, providers=chosen, enable_fallback=0)


@contextlib.contextmanager
def _quiet(provider: Provider) -> Iterator[None]:
    """What goes wrong with a provider is raised or asked for; ONNX Runtime would also print it."""
    if provider.ort_name == _CPU:
        yield
        return
    ort.set_default_logger_severity(_FATAL_ONLY)
    try:
        yield
    finally:
        ort.set_default_logger_severity(_WARNINGS)


def _load_error(path: Path, provider: Provider, error: Exception) -> PackageError | ProviderError:
    return memory_error(provider, error) or PackageError(
        f"{path}: onnxruntime cannot load it on {provider.ort_name}", found=str(error)
    )


def memory_error(provider: Provider, error: Exception) -> ProviderError | None:
    """What is said where there is no room; None where ONNX Runtime failed for another reason."""
    if not _NO_MEMORY.search(str(error)):
        return None
    smaller = "use a smaller package, fewer rows or a shorter context"
    if "memory_limit" in provider.accepts:
        owner, fix = provider.ort_name, f"raise --gpu-mem-limit, or {smaller}"
    elif provider.ort_name == _CPU:
        owner, fix = "the machine", f"{smaller}, or bound keys and values with --kv-budget"
    else:
        owner, fix = provider.ort_name, smaller
    return ProviderError(f"{owner} has too little memory for this", found=str(error), fix=fix)


def run_error(session: ort.InferenceSession, error: Exception) -> ProviderError:
    """What is said where a provider could load a graph and fails to run it."""
    provider = find_provider(provider_in_use(session))
    return memory_error(provider, error) or ProviderError(
        f"{provider.ort_name} could load the graph and fails to run it",
        found=str(error),
        fix="try another provider",
    )


def run_bound(
    session: ort.InferenceSession, binding: ort.IOBinding, options: ort.RunOptions | None = None
) -> None:
    """Run a session over what is bound.

    Raises:
        ProviderError: The provider fails, though it could load the graph.
    """
    try:
        session.run_with_iobinding(binding, options)
    except Exception as error:  # onnxruntime raises its own classes, one a status code
        raise run_error(session, error) from error


def assigned_nodes(session: ort.InferenceSession) -> dict[str, dict[str, int]] | None:
    """Nodes by operator that each provider of a session was given, by ONNX Runtime's name of it.

    None where ONNX Runtime does not tell: before 1.24, or without the recording that `open_session` asks for.
    """
    try:
        parts = session.get_provider_graph_assignment_info()
    except Exception:  # onnxruntime raises its own classes
        return None
    found: dict[str, Counter[str]] = {}
    for part in parts:
        operators = found.setdefault(part.ep_name, Counter())
        operators.update(node.op_type for node in part.get_nodes())
    return {name: dict(operators.most_common()) for name, operators in found.items()}


def left_to_cpu(session: ort.InferenceSession, provider: Provider) -> str | None:
    """What runs on the CPU though another provider was asked for; None where nothing heavy does."""
    if provider.ort_name == _CPU:
        return None
    active: list[str] = session.get_providers()
    if active[0] != provider.ort_name:
        return f"the session runs on {', '.join(active)}"
    heavy = {k: n for k, n in (assigned_nodes(session) or {}).get(_CPU, {}).items() if k in HEAVY}
    if not heavy:
        return None
    counts = ", ".join(f"{count} {operator}" for operator, count in heavy.items())
    return f"{counts} run on {_CPU}"


def provider_in_use(session: ort.InferenceSession) -> str:
    """Name of the provider file for what a session really runs on."""
    active = session.get_providers()[0]
    return next(name for name in provider_names() if find_provider(name).ort_name == active)
