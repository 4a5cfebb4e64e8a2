"""A contestant's own process: asked in lines of JSON on standard input, answers on standard output.

The first line is a `Spec`: {"target": "module:Class", "fields": {...}, "imports": [...]}. Then

    {"do": "load"}                        -> {"load_s": 0.2, "runs_on": "...", "libraries": {"numpy": "2.4"},
                                              "fallback": null, "nodes": null}
    {"do": "run", "rows": [[1]], "case": {"prompt_tokens": 1, ...}}
                                          -> {"prefill_s": 0.1, "step_s": [0.01, ...], "energy_j": null}
    {"do": "memory"}                      -> {"peak_rss_bytes": 1, "pss_bytes": 1, "note": "",
                                              "device_bytes": null}
    {"do": "rates"}                       -> what the roofline's `rates` says

and {"failure": "..."} where one of them fails. It ends with its input. What libraries print goes to standard
error. Apart from what the contestant needs, it takes the base installation: neither torch nor onnx.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO

from onnxlm.runtime.bench import Case, reason, settle, time_run
from onnxlm.runtime.energy import EnergyMeter
from onnxlm.runtime.machine import library_versions
from onnxlm.runtime.memory import read_memory


class _Worker:
    """Answers requests about one contestant."""

    def __init__(self, spec: dict[str, Any]) -> None:
        module, _, name = spec["target"].partition(":")
        for library in spec["imports"]:
            importlib.import_module(library)  # before the clock of a load starts
        self._contestant = getattr(importlib.import_module(module), name)(**spec["fields"])
        self._meter = EnergyMeter()

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        runs_on = self._contestant.prepare()
        load_s = time.perf_counter() - start
        placement: dict[str, Any] = getattr(self._contestant, "placement", dict)()
        libraries = {"python": platform.python_version(), **library_versions()}
        return {"load_s": load_s, "runs_on": runs_on, "libraries": libraries, **placement}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        case = Case(**request["case"])
        settle()
        before = self._meter.start()
        sample = time_run(self._contestant, request["rows"], case)
        return {**asdict(sample), "energy_j": self._meter.joules_since(before)}

    def memory(self, request: dict[str, Any]) -> dict[str, Any]:
        device = getattr(self._contestant, "device_used", None)
        return {**asdict(read_memory()), "device_bytes": None if device is None else device()}

    def rates(self, request: dict[str, Any]) -> dict[str, Any]:
        rates: dict[str, Any] = self._contestant.rates()
        return rates


def main() -> None:
    """Serve until standard input ends."""
    answers = _private_stdout()
    worker: _Worker | None = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if worker is None:
                worker = _Worker(request)
                continue
            _say(answers, getattr(worker, request["do"])(request))
        except Exception as error:  # the parent shows it in the contestant's row
            _say(answers, {"failure": reason(error)})


def _private_stdout() -> TextIO:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
