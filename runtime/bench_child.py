"""The parent's end of a contestant's process: starts it, asks it, ends it.

Each contestant has a process of its own, so that none shares threads, memory or libraries with another, and
so that one whose provider lives in another wheel runs under the interpreter that has it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import onnxlm
from onnxlm.errors import OnnxlmError
from onnxlm.runtime.bench import Case, Rows, Sample
from onnxlm.runtime.foreign_load import ForeignLoad
from onnxlm.runtime.memory import Memory

# Makes these very files the child's onnxlm, whatever is installed there, and leaves Ctrl-C to the parent.
_BOOTSTRAP = """
import importlib.util, json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
paths = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location(
    "onnxlm", paths[0] + "/__init__.py", submodule_search_locations=paths
)
module = sys.modules["onnxlm"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from onnxlm.runtime.bench_worker import main
main()
"""
_GRACE_S = 10


class ChildError(OnnxlmError):
    """A contestant could not be loaded or run in its process."""


@dataclass(frozen=True)
class Spec:
    """What runs in a child.

    Attributes:
        target: Class of the contestant, as "module:Class".
        fields: What it is made with; values that JSON has.
        imports: Libraries to import before the time of a load is taken.
        python: Interpreter; it needs onnxruntime, numpy, tokenizers and jinja2 for a package.
        environment: Variables added to the parent's.
    """

    target: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """What a child says of its load.

    Attributes:
        load_s: Seconds to load the model.
        runs_on: What it really runs on.
        libraries: Versions of the libraries that run models, and of Python, by name.
        fallback: Why that is not, or not wholly, what was asked for; None when it is.
        nodes: Graph -> provider -> operator -> nodes, by ONNX Runtime's names; None where it does not tell.
    """

    load_s: float
    runs_on: str
    libraries: dict[str, str]
    fallback: str | None = None
    nodes: dict[str, dict[str, dict[str, int]]] | None = None


class Child:
    """A running process with one contestant.

    Args:
        spec: What runs.

    Raises:
        ChildError: The interpreter cannot be started.

    Attributes:
        foreign_load: Cores that other processes used during each run; empty where the system does not tell.
    """

    def __init__(self, spec: Spec) -> None:
        self.foreign_load: list[float] = []
        # A file, not a pipe: a pipe that nobody reads would fill and halt the child.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `stop`)
        environment = {**os.environ, **spec.environment}
        if spec.python == sys.executable:
            # The same places to import from: the contestant's class may come from anywhere.
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._process = subprocess.Popen(
                [spec.python, "-P", "-c", _BOOTSTRAP, json.dumps(_package_path())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise ChildError(f"{spec.python} cannot be started: {error.strerror}") from error
        self._send({"target": spec.target, "fields": spec.fields, "imports": spec.imports})

    def load(self) -> Loaded:
        """Load the model.

        Raises:
            ChildError: It fails; says why. So do the other requests.
        """
        return Loaded(**self._ask(do="load"))

    def run(self, rows: Rows, case: Case) -> Sample:
        """One timed run."""
        load = ForeignLoad(self._process.pid)
        answer = self._ask(do="run", rows=rows, case=asdict(case))
        cores = load.cores()
        if cores is not None:
            self.foreign_load.append(cores)
        return Sample(answer["prefill_s"], tuple(answer["step_s"]), answer["energy_j"])

    def memory(self) -> Memory:
        """What the process holds."""
        return Memory(**self._ask(do="memory"))

    def rates(self) -> dict[str, float]:
        """What a roofline measures once."""
        return self._ask(do="rates")

    def stop(self, at_once: bool = False) -> None:
        """End the process.

        Args:
            at_once: Do not wait for what it is doing.
        """
        if at_once:
            self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()  # a worker ends with its input
                except OSError:  # what was not written yet has no reader any more
                    continue
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        self._send(request)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(self._ending())
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise ChildError(answer["failure"])
        return answer

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except OSError:  # it has ended; reading its answer says how
            return

    def _ending(self) -> str:
        """How and why a process that does not answer has ended."""
        code = self._process.wait()
        if code == -getattr(signal, "SIGKILL", 0):  # Windows has no such signal
            return "its process was killed, as a system without free memory does"
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = f"its process ended with code {code}"
        return f"{why}: {said}" if said else why


def _package_path() -> list[str]:
    """Where the modules of onnxlm lie: its own folder, and the one that holds the stages' folders."""
    own = Path(str(onnxlm.__file__)).resolve().parent
    return list(dict.fromkeys([str(own), str(Path(__file__).resolve().parents[1])]))
