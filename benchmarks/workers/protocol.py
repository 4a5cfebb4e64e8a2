"""A worker: one model in its own process and interpreter, asked over standard input in lines of JSON.

    {"do": "run", "ids": [1], "new_tokens": 128}            -> {"prefill_s": 0.1, "step_s": [0.01, ...]}
    {"do": "logits", "ids": [1], "by": "prefill", "out": D} -> {"files": ["D/0.npy", ...]}  float32 [n, vocab]
    {"do": "quit"}

The first line that it writes, once the model is loaded, is {"load_s": 0.2, "bytes": 1000, "version": "..."};
a request that fails is answered {"error": "..."}. Needs numpy alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

CHUNK = 128


class Known(Protocol):
    """What a worker's file supplies in any case."""

    version: str  # of the library that runs it
    bytes: int  # of its files

    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """Run tokens behind those before (forget them if `first`); float32 [len(ids), vocab]."""


class Stepped(Known, Protocol):
    """A library that can be asked for one token after the other."""

    def prefill(self, ids: list[int], new_tokens: int) -> None:
        """Forget the last sequence and run a prompt, with room for new tokens, up to the first of them."""

    def step(self) -> None:
        """One greedy step."""


class Streamed(Known, Protocol):
    """A library that generates in one call and tells of each token."""

    def generate(self, ids: list[int], new_tokens: int, token: Callable[[], None]) -> None:
        """Forget the last sequence and generate greedily; calls `token` as each becomes known."""


Model = Stepped | Streamed


def serve(open_model: Callable[[list[str]], Model]) -> None:
    """Load the model that the command line names and answer requests until told to quit."""
    answers = _private_stdout()
    try:
        start = time.perf_counter()
        model = open_model(sys.argv[1:])
        load_s = time.perf_counter() - start
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    _say(answers, {"load_s": load_s, "bytes": model.bytes, "version": model.version})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            break
        try:
            _say(answers, _answer(model, request))
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _answer(model: Model, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "run":
        return _run(model, request["ids"], request["new_tokens"])
    if request["do"] == "logits":
        return {"files": list(_logits(model, request))}
    raise ValueError(f"no such request: {request['do']!r}")


def _run(model: Model, ids: list[int], new_tokens: int) -> dict[str, Any]:
    clock = time.perf_counter
    if hasattr(model, "generate"):
        times = [clock()]
        model.generate(ids, new_tokens, lambda: times.append(clock()))
        if len(times) != new_tokens + 1:
            raise ValueError(f"asked for {new_tokens} tokens, told of {len(times) - 1}")
        prefill_s, *steps = (after - before for before, after in pairwise(times))
        return {"prefill_s": prefill_s, "step_s": steps}
    start = clock()
    model.prefill(ids, new_tokens)
    prefill_s = clock() - start
    steps = []
    for _ in range(new_tokens - 1):
        start = clock()
        model.step()
        steps.append(clock() - start)
    return {"prefill_s": prefill_s, "step_s": steps}


def _logits(model: Model, request: dict[str, Any]) -> Iterator[str]:
    """Files of logits behind every token, by prompts of `CHUNK` tokens or by single steps."""
    ids = request["ids"]
    for number, start in enumerate(range(0, len(ids), CHUNK)):
        part = ids[start : start + CHUNK]
        if request["by"] == "decode":
            rows = [model.feed([token], start + i == 0).copy() for i, token in enumerate(part)]
            logits = np.concatenate(rows)
        else:
            logits = model.feed(part, start == 0)
        file = Path(request["out"]) / f"{number}.npy"
        np.save(file, np.asarray(logits, dtype=np.float32))
        yield str(file)


def _private_stdout() -> TextIO:
    """Standard output for answers alone: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
