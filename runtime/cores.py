"""Cores that this process may keep busy: its affinity, and the time that its control groups give it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Cores by affinity, where the platform tells, but no more than the smallest quota pays for.

    Args:
        cgroups: Where Linux shows control groups.
        own: The list of those that the process is in.
    """
    told = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if told else os.cpu_count() or 1
    quotas = [quota for folder in _folders(cgroups, own) if (quota := _quota(folder)) is not None]
    return max(1, min(cores, *(int(quota) for quota in quotas))) if quotas else cores


def _folders(cgroups: Path, own: Path) -> Iterator[Path]:
    """Folders of the process's groups and of all groups around them, those of version 1 too.

    Inside a container the own group is the root, whatever its path is called outside: what is not there is
    passed over, the root is always looked at.
    """
    roots = {"": cgroups, "cpu": cgroups / "cpu", "cpu,cpuacct": cgroups / "cpu,cpuacct"}
    yield from roots.values()
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = [part for part in path.split("/") if part]
        if controllers in roots:
            for depth in range(1, len(parts) + 1):
                yield roots[controllers].joinpath(*parts[:depth])


def _quota(group: Path) -> float | None:
    """Cores' worth of time of one group; None without a limit.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst.
    """
    try:
        limit, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):  # the root group, or the first version
        pass
    try:
        limit, period = (
            (group / f"cpu.cfs_{name}_us").read_text(encoding="ascii")
            for name in ("quota", "period")
        )
        return None if int(limit) < 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None
