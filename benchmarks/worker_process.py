"""The driver's end of a worker: starts it, asks it, watches how much of the machine others take."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxlm.runtime.bench import SETTLE_S, Sample
from onnxlm.runtime.foreign_load import ForeignLoad
from onnxlm.runtime.memory import Memory, read_memory

WORKERS = Path(__file__).parent / "workers"


class WorkerError(RuntimeError):
    """A worker did not start, answered with an error, or died."""


@dataclass(frozen=True)
class Spec:
    """How to start a worker.

    Attributes:
        name: The contestant's.
        kind: Its file in `workers/` is KIND_worker.py.
        python: Interpreter that has its library.
        path: Model it loads.
        threads: Threads inside an operator.
        flags: More arguments of the worker.
    """

    name: str
    kind: str
    python: str
    path: str
    threads: int
    flags: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the worker's command line."""
        return self.path, str(self.threads), *self.flags


@dataclass
class Worker:
    """A running worker.

    Attributes:
        spec: What it runs.
        ready: What it said when its model was loaded: load_s, bytes, version.
        foreign_load: Cores that other processes used during each timed run; empty where /proc is absent.
    """

    spec: Spec
    ready: dict[str, Any] = field(default_factory=dict)
    foreign_load: list[float] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and wait until its model is loaded."""
        spec = self.spec
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec.threads)}
        try:
            self._process = subprocess.Popen(
                [spec.python, str(WORKERS / f"{spec.kind}_worker.py"), *spec.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise WorkerError(f"{spec.name}: {spec.python}: {error.strerror}") from error
        self.ready = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        process = self._running()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, which is what there is to say
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return self._answer()

    def run(self, ids: list[int], new_tokens: int) -> Sample:
        """One timed run."""
        time.sleep(SETTLE_S)
        load = ForeignLoad(self._running().pid)
        answer = self.ask(do="run", ids=ids, new_tokens=new_tokens)
        cores = load.cores()
        if cores is not None:
            self.foreign_load.append(cores)
        return Sample(answer["prefill_s"], tuple(answer["step_s"]))

    def memory(self) -> Memory:
        """What the worker's process holds."""
        return read_memory(self._running().pid)

    def stop(self) -> None:
        """End it."""
        if self._process is None:
            return
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # of one that is dead
                    stream.close()  # a worker ends with its input
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise WorkerError(f"{self.spec.name}: is not running")
        return self._process

    def _answer(self) -> dict[str, Any]:
        process = self._running()
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.spec.name}: {_end(process.wait())}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.spec.name}: {answer['error']}")
        return answer


def _end(code: int) -> str:
    """How a process ended; a negative code is a signal's number."""
    return f"ended with code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
