"""How many bytes a cache may take: what the user allows, or what the machine has left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from onnxlm.errors import InputError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def read_bytes(text: str | int | None, name: str = "kv_budget") -> int | None:
    """A number of bytes: a plain number, or one with a unit (512MB, 1.5 GiB); None stays None.

    Args:
        text: The number.
        name: What it is of, for the message.

    Raises:
        InputError: It is none, or not above 0.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", str(text).strip().upper())
    count = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if count <= 0:
        raise InputError(
            name,
            found=repr(text),
            allowed='a number of bytes above 0, with a unit or without: 512MB, "1.5 GiB"',
        )
    return count


def affordable(
    size: Callable[[int], int],
    needed: int,
    wanted: int,
    budget: int | None,
    held: int = 0,
    on_host: bool = True,
) -> int:
    """Columns that a cache gets.

    Args:
        size: Bytes of so many columns, all buffers together; more columns are more bytes.
        needed: Columns that it cannot do without.
        wanted: Columns it would have, so that it need not grow at once again.
        budget: Most bytes it may take; None for what the machine has left, and for no bound on a device.
        held: Bytes that it has already, and gives back.
        on_host: Whether it is in the machine's own memory: how much of a device's is left, its provider
            alone knows, which refuses what does not fit.

    Returns:
        From `needed` to `wanted`.

    Raises:
        InputError: Not even what is needed fits.
    """
    allowed, limit = budget, "kv_budget"
    if allowed is None:
        available = available_memory() if on_host else None
        if available is None:
            return wanted
        allowed, limit = held + available, "memory that is free"
    if size(needed) > allowed:
        raise InputError(
            f"the key and value cache has no room for {needed:,} columns",
            found=f"{size(needed):,} bytes needed",
            allowed=f"{allowed:,} bytes ({limit})",
            fix="shorten the prompt, run fewer rows or new tokens, or allow more with --kv-budget",
        )
    if size(wanted) <= allowed:
        return wanted
    low, high = needed, wanted  # the former fits, the latter does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= allowed else (low, middle)
    return low


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that this process can still have without swapping; None where the system does not tell.

    Args:
        proc: Where Linux shows the machine's memory.
        cgroups: Where it shows the limit of the process's own container.
    """
    found = [_machine(proc / "meminfo"), _container(cgroups)]
    return min((count for count in found if count is not None), default=None)


def _machine(file: Path) -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", file.read_text(encoding="ascii"), re.M)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def _container(folder: Path) -> int | None:
    """What a container's limit leaves; pages that only mirror files give way."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        current = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):  # no container, no limit ("max"), or the first version of cgroups
        return None
    files = re.search(r"^file (\d+)$", stat, re.M)
    return max(0, limit - current + (int(files[1]) if files else 0))
