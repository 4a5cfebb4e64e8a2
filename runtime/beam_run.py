"""One generation by beam search: every prompt's beams are rows of one batch."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Generator, Iterator

import numpy as np
from numpy.typing import NDArray

from onnxlm.runtime.arrays import Floats
from onnxlm.runtime.beam import Beam, BeamSearch, BeamSettings, Tell
from onnxlm.runtime.engine import PromptCancelledError
from onnxlm.runtime.generation import Generation
from onnxlm.runtime.generation_fields import refused
from onnxlm.runtime.logits_rules import LogitsRules, apply_rules, check_left
from onnxlm.runtime.logprobs import log_normalizers, token_logprob
from onnxlm.runtime.penalties import Logits
from onnxlm.runtime.row_history import RowHistory
from onnxlm.runtime.sampling import check_logits
from onnxlm.runtime.sampling_run import Prompts
from onnxlm.runtime.token_loop import Timings


class BeamRun:
    """Beam search behind each prompt; a prompt's beams lie one behind the other in the batch.

    When it ends the batch holds the prompts and nothing of any beam.

    Args:
        prompts: What it begins with; all with the same num_beams.

    Attributes:
        cancelled: Once set, by any thread, no step runs any more.

    Raises:
        InputError: The prompts differ in num_beams, or a field names a token outside the vocabulary.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._beams = prompts.params[0].num_beams
        for one in prompts.params:
            if one.num_beams != self._beams:
                raise refused("num_beams", one.num_beams, f"{self._beams}, as for the first prompt")
        self._limits = [prompts.limits(i) for i in range(len(prompts.rows))]
        ends = [frozenset({*one.eos, *one.stop_token_ids}) for one in self._limits]
        self._rules = [
            LogitsRules(one, end, prompts.vocab_size)
            for one, end in zip(prompts.params, ends, strict=True)
        ]
        self._searches = [self._search(i, end) for i, end in enumerate(ends)]
        self._timings = Timings()
        self.cancelled = prompts.batch.cancelled = threading.Event()

    def _search(self, prompt: int, ends: frozenset[int]) -> BeamSearch:
        params, room = self._prompts.params[prompt], self._limits[prompt].room
        most = room if params.max_new_tokens is None else min(room, params.max_new_tokens)
        settings = BeamSettings(
            beams=self._beams,
            limit=most,
            ends=ends,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        ruled = not self._rules[prompt].idle
        history = RowHistory(self._prompts.whole(prompt)) if ruled else None
        search = BeamSearch(settings, history)
        search.done = most == 0
        return search

    def steps(self) -> Iterator[None]:
        """Advance token by token."""
        batch, began = self._prompts.batch, time.perf_counter()
        if self.cancelled.is_set() or not self._live().any():
            return
        batch.expect(batch.rows * self._beams)
        try:
            logits = batch.prefill_logits(self._prompts.rows)
        except PromptCancelledError:
            return
        held, first = batch.lengths, np.arange(batch.rows) * self._beams
        copies = np.repeat(np.arange(batch.rows), self._beams)
        batch.reorder(copies)
        try:
            sources, tokens = self._advance(logits[copies])
            self._timings.ttft_s = time.perf_counter() - began
            yield
            while self._live().any() and not self.cancelled.is_set():
                began = time.perf_counter()
                batch.reorder(sources)
                batch.set_tokens(tokens)
                sources, tokens = self._advance(batch.decode_logits(self._live()))
                self._timings.steps_s.append(time.perf_counter() - began)
                yield
        finally:
            batch.reorder(first)
            batch.rewind(np.minimum(held, batch.lengths))

    def text(self) -> Generator[str, None, None]:
        """Search, then give the only prompt's text: no part of it is certain before the end."""
        for _ in self.steps():
            pass
        text = self.result(0).decoded
        if text is not None:
            yield text

    def _live(self) -> NDArray[np.bool_]:
        """Rows whose search goes on, bool [rows]."""
        return np.repeat([not search.done for search in self._searches], self._beams)

    def _advance(self, logits: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Let every search choose; from which row each row goes on, and with which token, int64 [rows]."""
        sources = np.arange(len(logits))
        tokens = np.zeros_like(sources)
        for i, search in enumerate(self._searches):
            if search.done:
                continue
            rows = slice(i * self._beams, (i + 1) * self._beams)
            own = logits[rows]
            check_logits(own)
            normalizers = log_normalizers(own)
            ruled: Logits = own - normalizers[:, None]
            histories = [beam.history for beam in sorted(search.running, key=lambda b: b.row)]
            known = [history for history in histories if history is not None]
            if known:
                ruled = apply_rules(ruled, [self._rules[i]] * self._beams, known)
                # A beam that is left nothing falls behind the others.
                check_left(ruled.reshape(1, -1), known[:1])
            tell = self._tell(i, own, normalizers)
            chosen_sources, chosen = search.advance(ruled, tell)
            sources[rows] = rows.start + np.array(chosen_sources)
            tokens[rows] = chosen
        return sources, tokens

    def _tell(self, prompt: int, own: Floats, normalizers: NDArray[np.float64]) -> Tell | None:
        count = self._prompts.params[prompt].logprobs
        if count is None:
            return None
        return lambda row, token_id: token_logprob(
            own[row], float(normalizers[row]), token_id, count
        )

    def result(self, prompt: int) -> Generation:
        """What a prompt has come to: its best complete sequences once it has ended, the best beam before."""
        search, wanted = self._searches[prompt], self._prompts.params[prompt].num_return_sequences
        if search.done and search.complete:
            one, *others = (self._of_beam(prompt, b, b.score) for b in search.complete[:wanted])
            return dataclasses.replace(one, alternatives=tuple(others))
        return self._of_beam(prompt, search.running[0], None)

    def _of_beam(self, prompt: int, beam: Beam, score: float | None) -> Generation:
        ids, limits = list(beam.token_ids), self._limits[prompt]
        reason = limits.reason(len(ids), ids[-1] if ids else None)
        shown = ids[:-1] if reason == "stop" else ids
        best = [search.complete[0] for search in self._searches if search.complete]
        made, spent = sum(len(b.token_ids) - 1 for b in best), sum(self._timings.steps_s)
        return Generation(
            decoded=self._prompts.text(prompt, shown),
            token_ids=ids,
            finish_reason=reason or ("cancelled" if self.cancelled.is_set() else None),
            prompt_tokens=len(self._prompts.rows[prompt]),
            ttft_s=self._timings.ttft_s,
            decode_tokens_per_s=made / spent if spent else 0.0,
            logprobs=None if self._prompts.params[prompt].logprobs is None else list(beam.logprobs),
            score=score,
        )
