"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from onnxlm.runtime.cores import usable_cores
from onnxlm.runtime.providers import find_provider, provider_names
from onnxlm.version import VERSION

# Instructions that the fast integer and float kernels ask for.
FLAGS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)


@dataclass(frozen=True)
class Machine:
    """A machine and what runs on it.

    Attributes:
        cpu: The processor's own name.
        cpu_flags: Those of `FLAGS` that it has; empty where the system does not tell.
        cores: Cores that this process may use.
        memory_bytes: Installed memory; None where the system does not tell.
        os: Operating system and version.
        python: Version.
        libraries: Versions of the libraries that run models, by name.
    """

    cpu: str
    cpu_flags: tuple[str, ...]
    cores: int
    memory_bytes: int | None
    os: str
    python: str
    libraries: dict[str, str]


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """This machine.

    Args:
        cpuinfo: The kernel's description of the processors.
    """
    fields = _cpu_fields(cpuinfo)
    known = fields.get("flags", fields.get("Features", "")).split()
    return Machine(
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        cpu_flags=tuple(flag for flag in FLAGS if flag in known),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        os=platform.platform(),
        python=platform.python_version(),
        libraries=library_versions(),
    )


def _cpu_fields(cpuinfo: Path) -> dict[str, str]:
    """Fields of the first processor."""
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that run models, by the name of their distribution."""
    providers = [find_provider(name) for name in provider_names()]
    # Several wheels bring ONNX Runtime under one import name.
    wheels = {provider.wheel for provider in providers if provider.wheel}
    wheels |= {provider.plugin.wheel for provider in providers if provider.plugin}
    found = {"onnxlm": VERSION}
    for name in (*sorted(wheels), "numpy", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
