"""Speed of contestants side by side: round after round, each in turn, so that drift hits all alike.

Knows nothing of packages, processes or tables: a contestant is what can be loaded, prefilled and stepped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from onnxlm.errors import OnnxlmError
from onnxlm.progress import Progress, silent

# After a run, worker threads spin for a moment before they sleep; the next contestant waits that out.
SETTLE_S = 0.05

Rows = Sequence[Sequence[int]]


class Contestant(Protocol):
    """A model that continues rows of token ids greedily; all rows of a call are equally long."""

    def prepare(self) -> str:
        """Load it; returns what it runs on (ONNX Runtime's name of the provider, or a library's).

        One that may run elsewhere than asked for has the methods `placement` and `device_used` too, see
        `PackageContestant`.
        """

    def prefill(self, rows: Rows) -> None:
        """Forget what was, run prompts; done when each row's first new token is known."""

    def extend(self, rows: Rows) -> None:
        """Run more tokens behind what is cached; done when each row's next token is known."""

    def step(self) -> None:
        """Run the last new token of each row; done when the next is known."""


@dataclass(frozen=True)
class Case:
    """What a contestant runs at its turn.

    Attributes:
        prompt_tokens: Length of each prompt.
        new_tokens: Tokens to generate a row, the one behind the prompt included.
        batch: Rows that run together.
        context_lengths: If there are any, the run is a curve: the caches are filled up to each of these in
            turn, and `new_tokens` steps are taken there. `prompt_tokens` is the first of them then.
    """

    prompt_tokens: int
    new_tokens: int
    batch: int = 1
    context_lengths: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        """Positions that each row needs."""
        return max((self.prompt_tokens, *self.context_lengths)) + self.new_tokens


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        prefill_s: Seconds from the prompts' ids to the first new tokens.
        step_s: Seconds of each decode step; of a curve, those of all its lengths one after the other.
        energy_j: What the processor took meanwhile; None where that cannot be read.
    """

    prefill_s: float
    step_s: tuple[float, ...]
    energy_j: float | None = None


@dataclass
class Track:
    """Runs of one contestant on one case.

    Attributes:
        name: The contestant's.
        case: What it runs.
        samples: One a round; the warm-up is not among them.
        failure: Why it was not run, or not to the end.
    """

    name: str
    case: Case
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class Plan:
    """What every contestant runs.

    Attributes:
        cases: The runs.
        repeats: Rounds that count.
        warm_up: Rounds before them that do not.
    """

    cases: tuple[Case, ...]
    repeats: int
    warm_up: int = 1


T = TypeVar("T")
Measure = Callable[[T, Case], Sample]


def _nothing(counts: bool) -> None:
    """What a round begins with where nothing else is asked for."""


@dataclass
class Rounds(Generic[T]):
    """Interleaved measurement of named contestants.

    Args:
        plan: Cases and numbers.
        contestants: By name, in the order in which they take turns.
        measure: Runs one contestant on one case.
        before_round: Called at the beginning of each round; told whether the round counts.

    Attributes:
        tracks: Results so far, by contestant, then by case.
        interrupted: The user stopped the run; `tracks` holds what was done.
    """

    plan: Plan
    contestants: dict[str, T]
    measure: Measure[T]
    before_round: Callable[[bool], None] = _nothing
    tracks: list[Track] = field(init=False)
    interrupted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.tracks = [Track(name, case) for name in self.contestants for case in self.plan.cases]

    def run(self, progress: Progress = silent) -> list[Track]:
        """Run all rounds; Ctrl-C ends them early and keeps what is done."""
        rounds = range(-self.plan.warm_up, self.plan.repeats)
        # Within a round all contestants run the same case before the next case's turn.
        turns = sorted(self.tracks, key=lambda track: self.plan.cases.index(track.case))
        total = len(rounds) * len(turns)
        try:
            for i, number in enumerate(rounds):
                self.before_round(number >= 0)
                for j, track in enumerate(turns):
                    progress("measure", i * len(turns) + j, total)
                    self._turn(track, counts=number >= 0)
            progress("measure", total, total)
        except KeyboardInterrupt:
            self.interrupted = True
        return self.tracks

    def _turn(self, track: Track, counts: bool) -> None:
        if track.failure is not None:
            return
        try:
            sample = self.measure(self.contestants[track.name], track.case)
        except (
            Exception
        ) as error:  # one contestant's fault is its row's, whatever library raised it
            track.failure = reason(error)
            return
        if counts:
            track.samples.append(sample)


def reason(error: Exception) -> str:
    """One line on why something did not run."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OnnxlmError) else f"{type(error).__name__}: {text}"


def settle() -> None:
    """Let the threads of who ran before go to sleep; before each run, and no part of it."""
    time.sleep(SETTLE_S)


def time_run(contestant: Contestant, rows: Rows, case: Case) -> Sample:
    """Run a case and take the time of each call.

    Args:
        contestant: Loaded.
        rows: Token ids, at least as many a row as the case's longest prompt or context.
        case: What to run.
    """
    clock = time.perf_counter
    start = clock()
    contestant.prefill([row[: case.prompt_tokens] for row in rows])
    prefill_s = clock() - start
    if not case.context_lengths:
        return Sample(prefill_s, _time_steps(contestant, case.new_tokens - 1))
    steps = _time_steps(contestant, case.new_tokens)
    cached = case.prompt_tokens + case.new_tokens
    for length in case.context_lengths[1:]:
        contestant.extend([row[cached:length] for row in rows])
        steps += _time_steps(contestant, case.new_tokens)
        cached = length + case.new_tokens
    return Sample(prefill_s, steps)


def _time_steps(contestant: Contestant, count: int) -> tuple[float, ...]:
    clock = time.perf_counter
    steps = []
    for _ in range(count):
        start = clock()
        contestant.step()
        steps.append(clock() - start)
    return tuple(steps)
