"""Memory of a process, from what its operating system tells without further libraries."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Memory:
    """What a process holds; None is what this platform does not tell.

    Attributes:
        peak_rss_bytes: Most memory that was resident at once, files mapped in included.
        pss_bytes: Resident now, a page shared by n processes counted 1/n.
        note: What is missing and why; empty when nothing is.
        device_bytes: Of the device that it runs on, in use by whomever; where that is not the processor.
    """

    peak_rss_bytes: int | None
    pss_bytes: int | None
    note: str = ""
    device_bytes: int | None = None


def read_memory(pid: int | None = None, proc: Path = _PROC) -> Memory:
    """Memory of a process.

    Args:
        pid: Its number; this process when None.
        proc: Where the kernel's process files are mounted.
    """
    folder = proc / ("self" if pid is None else str(pid))
    # Not getrusage's peak where the kernel has this one: a child begins with its parent's.
    peak = _kilobytes(folder / "status", "VmHWM")
    pss = _kilobytes(folder / "smaps_rollup", "Pss")
    if peak is None and pid is None:
        peak = _peak_of_this_process()
    missing = [name for name, value in (("peak RSS", peak), ("PSS", pss)) if value is None]
    note = f"{' and '.join(missing)} not measured on {sys.platform}" if missing else ""
    return Memory(peak, pss, note)


def _kilobytes(file: Path, key: str) -> int | None:
    """Bytes of the line `key:  1234 kB`; None when there is no such file or line."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # another system, or a process that is not ours to look into
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return None


def _peak_of_this_process() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
