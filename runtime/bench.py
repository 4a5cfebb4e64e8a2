"""Speed of contestants side by side: round after round, each in turn, so that drift hits all alike.

Knows nothing of packages or tables: a contestant is what can be loaded, prefilled and stepped.
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


class Contestant(Protocol):
    """A model that continues token ids greedily, one sequence at a time."""

    def prepare(self) -> str:
        """Load it; returns what it runs on (ONNX Runtime's name of the provider, or a library's)."""

    def prefill(self, ids: Sequence[int]) -> None:
        """Forget the last sequence, run a prompt; done when the first new token is known."""

    def step(self) -> None:
        """Run the last new token; done when the next is known."""


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        prefill_s: Seconds from the prompt's ids to the first new token.
        step_s: Seconds of each decode step.
    """

    prefill_s: float
    step_s: tuple[float, ...]


@dataclass
class Track:
    """Runs of one contestant at one prompt length.

    Attributes:
        name: The contestant's.
        prompt_tokens: Length of the prompt.
        samples: One a round; the warm-up is not among them.
        failure: Why it was not run, or not to the end.
    """

    name: str
    prompt_tokens: int
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class Plan:
    """What every contestant runs.

    Attributes:
        prompt_tokens: Lengths of the prompts.
        new_tokens: Tokens a run generates, the one behind the prompt included.
        repeats: Rounds that count.
        warm_up: Rounds before them that do not.
    """

    prompt_tokens: tuple[int, ...]
    new_tokens: int
    repeats: int
    warm_up: int = 1


T = TypeVar("T")
Measure = Callable[[T, int], Sample]


@dataclass
class Rounds(Generic[T]):
    """Interleaved measurement of named contestants.

    Args:
        plan: Lengths and numbers.
        contestants: By name, in the order in which they take turns.
        measure: Runs one contestant at one prompt length.

    Attributes:
        tracks: Results so far, by contestant, then by prompt length.
        interrupted: The user stopped the run; `tracks` holds what was done.
    """

    plan: Plan
    contestants: dict[str, T]
    measure: Measure[T]
    tracks: list[Track] = field(init=False)
    interrupted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.tracks = [Track(n, p) for n in self.contestants for p in self.plan.prompt_tokens]

    def run(self, progress: Progress = silent) -> list[Track]:
        """Run all rounds; Ctrl-C ends them early and keeps what is done."""
        rounds = range(-self.plan.warm_up, self.plan.repeats)
        # Within a round all contestants have the same prompt before the next prompt's turn.
        turns = sorted(
            self.tracks, key=lambda track: self.plan.prompt_tokens.index(track.prompt_tokens)
        )
        total = len(rounds) * len(turns)
        try:
            for i, number in enumerate(rounds):
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
            sample = self.measure(self.contestants[track.name], track.prompt_tokens)
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


def time_run(contestant: Contestant, ids: Sequence[int], new_tokens: int) -> Sample:
    """Run a prompt and `new_tokens - 1` steps behind it, and take the time of each."""
    time.sleep(SETTLE_S)
    clock = time.perf_counter
    start = clock()
    contestant.prefill(ids)
    prefill_s = clock() - start
    steps = []
    for _ in range(new_tokens - 1):
        start = clock()
        contestant.step()
        steps.append(clock() - start)
    return Sample(prefill_s, tuple(steps))
