"""Contestants of a benchmark that compute nothing: they log their turns, and fail where they are told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxlm.errors import ProviderError
from onnxlm.runtime.bench_child import Spec
from onnxlm.runtime.bench_report import Label
from onnxlm.runtime.bench_run import Entry


@dataclass
class FakeContestant:
    """Takes no time at all.

    Attributes:
        name: For the log.
        log: File for what it does, a line each: name, what, lengths of the rows.
        fails_to_load: With this text.
        dies: In `prepare`, as this signal does; with this exit code if negative.
        fails_at: The prefill, counted from 1 in each process, that raises.
    """

    name: str
    log: str = os.devnull
    fails_to_load: str | None = None
    dies: int = 0
    fails_at: int = 0
    _prefills: int = 0

    def prepare(self) -> str:
        if self.fails_to_load is not None:
            raise ProviderError(self.fails_to_load)
        if self.dies < 0:
            os._exit(-self.dies)
        if self.dies > 0:
            signal.raise_signal(signal.Signals(self.dies))
        print("what a library says")  # must not reach the answers
        self._note("prepare")
        return "FakeProvider"

    def prefill(self, rows: Sequence[Sequence[int]]) -> None:
        self._prefills += 1
        if self._prefills == self.fails_at:
            raise RuntimeError("out of\nroom")
        self._note("prefill", *(len(row) for row in rows))

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        self._note("extend", *(len(row) for row in rows))

    def step(self) -> None:
        self._note("step")

    def _note(self, *what: object) -> None:
        with Path(self.log).open("a", encoding="utf-8") as file:
            file.write(" ".join(map(str, (self.name, *what))) + "\n")


def spec(name: str, **fields: Any) -> Spec:
    """It, to be run in a process of its own."""
    return Spec("support.contestants:FakeContestant", {"name": name, **fields})


def entry(name: str, context: int = 64, baseline: bool = False, **fields: Any) -> Entry:
    """It, ready to be benchmarked."""
    label = Label(
        model=name,
        provider="fake",
        ort_name="FakeProvider",
        precision="int8",
        threads=1,
        file_bytes=1_500_000,
        quality={"kl": 0.0123, "top1": 0.95},
        baseline=baseline,
    )
    return Entry(label, spec(name, **fields), lambda n, b: [list(range(n))] * b, context)
