"""How much of the machine other processes take while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")


class ForeignLoad:
    """Cores that processes other than one used between the making of this object and a call of `cores`.

    Args:
        pid: The process that is measured; this one when None.
        proc: Where the kernel's process files are mounted.
    """

    def __init__(self, pid: int | None = None, proc: Path = _PROC) -> None:
        self._folder = proc / ("self" if pid is None else str(pid))
        self._machine = proc / "stat"
        self._others = self._seconds_of_others()
        self._start = time.perf_counter()

    def cores(self) -> float | None:
        """1.0 is one core, busy all the time; None where the system does not tell."""
        others = self._seconds_of_others()
        if others is None or self._others is None:
            return None
        return max(0.0, others - self._others) / max(time.perf_counter() - self._start, 1e-9)

    def _seconds_of_others(self) -> float | None:
        try:
            machine = self._machine.read_text(encoding="ascii").split("\n", 1)[0].split()
            own = (self._folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, machine[1:9])
        fields = own.rpartition(")")[2].split()  # the process's name may hold anything
        ticks = user + nice + system + irq + softirq + steal - int(fields[11]) - int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")
