"""One generation of a batch, from prompts to results."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from onnxlm.runtime.choosing import TokenChooser
from onnxlm.runtime.draft_policy import StepCosts
from onnxlm.runtime.engine import Batch, PromptCancelledError
from onnxlm.runtime.generation import Generation
from onnxlm.runtime.row_text import RowText
from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.speculation import speculative
from onnxlm.runtime.stopping import RowLimits, RowStops
from onnxlm.runtime.token_loop import Timings, token_steps
from onnxlm.runtime.tokenizer import Tokenizer

_SEEDS = 2**64


@dataclass(frozen=True)
class Prompts:
    """What a generation begins with.

    Attributes:
        batch: A row for each prompt, and what it holds already.
        rows: New tokens of each prompt, at least one.
        params: Settings of each prompt.
        eos: Ids that end a text where a prompt's settings name none.
        context_length: Most positions of a row.
        vocab_size: Tokens that the model knows.
        tokenizer: Where the ids come from.
        held: Tokens of each prompt that the batch holds already; rules look at them too.
        begun: Last tokens of each prompt that are one text with the new ones; none where a new one begins.
        costs: What calls of the model's sessions cost, as far as it is known.
    """

    batch: Batch
    rows: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    eos: frozenset[int]
    context_length: int
    vocab_size: int
    tokenizer: Tokenizer
    held: Sequence[Sequence[int]] = ()
    begun: Sequence[Sequence[int]] = ()
    costs: StepCosts = field(default_factory=StepCosts)

    def limits(self, prompt: int) -> RowLimits:
        """What ends a sequence behind a prompt."""
        params, past = self.params[prompt], int(self.batch.lengths[prompt])
        return RowLimits(
            room=self.context_length - past - len(self.rows[prompt]),
            max_new_tokens=params.max_new_tokens,
            eos=self.eos if params.eos_token_id is None else frozenset(params.eos_token_id),
            stop_token_ids=frozenset(params.stop_token_ids),
        )

    def text(self, prompt: int, token_ids: Sequence[int]) -> str | None:
        """What new tokens say; None where there is no vocabulary."""
        if not self.tokenizer.has_text:
            return None
        begun = self.begun_of(prompt)
        whole = self.tokenizer.decode([*begun, *token_ids])
        return whole[len(self.tokenizer.decode(begun)) :] if begun else whole

    def begun_of(self, prompt: int) -> Sequence[int]:
        """See `begun`."""
        return self.begun[prompt] if self.begun else ()

    def whole(self, prompt: int) -> list[int]:
        """Every token before the first new one."""
        return [*(self.held[prompt] if self.held else ()), *self.rows[prompt]]


class Run(Protocol):
    """A generation under way.

    Attributes:
        cancelled: Once set, by any thread, no step runs any more.
    """

    cancelled: threading.Event

    def steps(self) -> Iterator[None]:
        """Advance token by token."""

    def text(self) -> Generator[str, None, None]:
        """Advance, giving the only prompt's text as it becomes certain."""

    def result(self, prompt: int) -> Generation:
        """What a prompt has come to."""


class SamplingRun:
    """Tokens one by one, each row by its own settings.

    When it ends the batch holds a row for each prompt again, and the first of its sequences.

    Args:
        prompts: What it begins with.

    Attributes:
        cancelled: Once set, by any thread, no step runs any more.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        wanted = [one.num_return_sequences for one in prompts.params]
        # The prompt of each row; the rows of a prompt lie one behind the other.
        self._sources = [prompt for prompt, count in enumerate(wanted) for _ in range(count)]
        self._first = np.cumsum([0, *wanted])
        limits = [prompts.limits(source) for source in self._sources]
        self._limits, self._stops = limits, RowStops(limits)
        self._params = [
            _with_own_seed(one, copy)
            for one, count in zip(prompts.params, wanted, strict=True)
            for copy in range(count)
        ]
        self._chooser = TokenChooser(
            self._params,
            [prompts.whole(source) for source in self._sources],
            [{*limit.eos, *limit.stop_token_ids} for limit in limits],
            prompts.vocab_size,
        )
        self._ids: list[list[int]] = [[] for _ in limits]
        self._texts = [
            self._row_text(row) if one.stop_strings else None
            for row, one in enumerate(self._params)
        ]
        self._timings = Timings()
        self.cancelled = prompts.batch.cancelled = threading.Event()
        guesses = [one.prompt_lookup_num_tokens for one in prompts.params]
        prompts.batch.expect(len(self._sources))
        self._batch = speculative(prompts.batch, prompts.held, guesses, prompts.costs)
        self._steps = token_steps(
            self._batch,
            prompts.rows,
            self._chooser,
            self._stops,
            self._timings,
            None if max(wanted, default=1) == 1 else np.array(self._sources),
        )

    def steps(self) -> Iterator[None]:
        """Advance token by token."""
        try:
            while not self.cancelled.is_set():
                tokens, live = next(self._steps)
                for row in np.flatnonzero(live).tolist():
                    self._take(row, int(tokens[row]))
                yield
        except (StopIteration, PromptCancelledError):
            return
        finally:
            self._batch.settle()
            if self._batch.rows > len(self._prompts.rows):
                self._batch.reorder(self._first[:-1])

    def _take(self, row: int, token_id: int) -> None:
        self._ids[row].append(token_id)
        text = self._texts[row]
        if text is None:
            return
        if not (
            self._stops.reasons[row] == "stop" and token_id in self._limits[row].stop_token_ids
        ):
            text.push(token_id, may_stop=self._may_stop(row))
        if self._stops.reasons[row] is not None:
            text.finish()
        if text.stopped:
            self._stops.stop(row)

    def _may_stop(self, row: int) -> bool:
        """Whether the row's last token may end its text, as an end-of-text token may."""
        params, before = self._params[row], len(self._ids[row]) - 1
        held = len(self._prompts.whole(self._sources[row])) + before if params.min_length else 0
        return before >= params.min_new_tokens and held >= params.min_length

    def text(self) -> Generator[str, None, None]:
        """Advance, giving the first row's text as it becomes certain."""
        text = self._texts[0] or self._row_text(0)
        self._texts[0], shown = text, 0
        for _ in self.steps():
            if len(text.text) > shown:
                yield text.text[shown:]
                shown = len(text.text)
        text.finish()  # what was held when someone cancelled
        if len(text.text) > shown:
            yield text.text[shown:]

    def result(self, prompt: int) -> Generation:
        """What a prompt has come to."""
        first, behind = self._first[prompt : prompt + 2]
        one, *others = (self._of_row(row) for row in range(first, behind))
        return dataclasses.replace(one, alternatives=tuple(others))

    def _of_row(self, row: int) -> Generation:
        ids, params, spent = self._ids[row], self._params[row], sum(self._timings.steps_s)
        made = sum(len(other) for other in self._ids) - len(self._ids)
        reason = self._stops.reasons[row]
        return Generation(
            decoded=self._text_of(row),
            token_ids=ids,
            finish_reason=reason or ("cancelled" if self.cancelled.is_set() else None),
            prompt_tokens=len(self._prompts.rows[self._sources[row]]),
            ttft_s=self._timings.ttft_s,
            decode_tokens_per_s=made / spent if spent else 0.0,
            logprobs=None if params.logprobs is None else self._chooser.logprobs[row],
        )

    def _row_text(self, row: int) -> RowText:
        begun = self._prompts.begun_of(self._sources[row])
        return RowText(self._prompts.tokenizer, self._params[row].stop_strings, begun)

    def _text_of(self, row: int) -> str | None:
        text, ids = self._texts[row], self._ids[row]
        if text is not None and self._params[row].stop_strings:
            return text.text
        stopped = self._stops.reasons[row] == "stop"
        return self._prompts.text(self._sources[row], ids[:-1] if stopped else ids)


def _with_own_seed(params: SamplingParams, copy: int) -> SamplingParams:
    """The settings of one of several sequences of a prompt: the next seed draws the next one."""
    if params.seed is None or copy == 0:
        return params
    return dataclasses.replace(params, seed=(params.seed + copy) % _SEEDS)
