"""Energy of the processor, from the counters that Linux shows of Intel's and AMD's (RAPL)."""

from __future__ import annotations

import sys
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Reads the counters of all processor packages; they count the whole machine, others' work too.

    Args:
        powercap: Where the kernel shows them.

    Attributes:
        note: Why energy is not measured; empty when it is.
    """

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        self._zones: list[Path] = []
        self._ranges: list[int] = []
        try:
            zones = sorted(powercap.glob("intel-rapl:*"))
            self._zones = [zone for zone in zones if _is_package(zone)]
            self._read()
            self._ranges = [_number(zone / "max_energy_range_uj") for zone in self._zones]
        except (OSError, ValueError):
            self.note = f"energy not measured: {powercap} may not be read by this user"
            self._zones = []
            return
        self.note = "" if self._zones else f"energy not measured: {sys.platform} shows no RAPL here"

    def _read(self) -> list[int]:
        return [_number(zone / "energy_uj") for zone in self._zones]

    def start(self) -> list[int]:
        """The counters now, for `joules_since`."""
        return self._read()

    def joules_since(self, start: list[int]) -> float | None:
        """Joules since `start` was taken, a counter's turn-over allowed for; None where there are none."""
        if not self._zones:
            return None
        used = (
            (now - before) % (size + 1)
            for now, before, size in zip(self._read(), start, self._ranges, strict=True)
        )
        return sum(used) / 1e6


def _is_package(zone: Path) -> bool:
    """Whether a zone is a whole processor package (of either maker), by the name that it gives itself.

    Beside the packages at the top ("package-0") lies "psys", which is the whole board and counts them again;
    below one lie its parts ("core", "uncore", "dram").
    """
    return (zone / "name").read_text(encoding="ascii").startswith("package")


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
