"""Contestants of a benchmark that compute nothing: they log their turns, and fail where they are told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxlm.errors import ProviderError
from onnxlm.runtime.bench_report import Label
from onnxlm.runtime.bench_run import Entry

# (contestant, what it did, prompt length or -1)
Turn = tuple[str, str, int]


@dataclass
class FakeContestant:
    """Takes no time at all.

    Attributes:
        name: For the log.
        log: What it did, in this process.
        fails_to_load: With this text.
        dies: In `prepare`, as this signal does; with this exit code if negative.
        fails_at: The prefill, counted from 1 in each process, that raises.
        interrupts_at: The prefill at which the user presses Ctrl-C.
    """

    name: str
    log: list[Turn] = field(default_factory=list)
    fails_to_load: str | None = None
    dies: int = 0
    fails_at: int = 0
    interrupts_at: int = 0
    _prefills: int = 0

    def prepare(self) -> str:
        if self.fails_to_load is not None:
            raise ProviderError(self.fails_to_load)
        if self.dies < 0:
            os._exit(-self.dies)
        if self.dies > 0:
            signal.raise_signal(signal.Signals(self.dies))
        self.log.append((self.name, "prepare", -1))
        return "FakeProvider"

    def prefill(self, ids: Sequence[int]) -> None:
        self._prefills += 1
        if self._prefills == self.fails_at:
            raise RuntimeError("out of\nroom")
        if self._prefills == self.interrupts_at:
            raise KeyboardInterrupt
        self.log.append((self.name, "prefill", len(ids)))

    def step(self) -> None:
        self.log.append((self.name, "step", -1))


def entry(contestant: FakeContestant, lengths: Sequence[int] = (8,), context: int = 64) -> Entry:
    """It, ready to be benchmarked."""
    label = Label(
        model=contestant.name,
        provider="fake",
        ort_name="FakeProvider",
        precision="int8",
        file_bytes=1_500_000,
        quality={"kl": 0.0123, "top1": 0.95},
    )
    return Entry(label, contestant, {n: list(range(n)) for n in lengths}, context)
