"""Who chooses the next token of every row: the rules, a draw, and a record of what is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxlm.runtime.arrays import Floats
from onnxlm.runtime.logits_rules import LogitsRules, apply_rules, check_left
from onnxlm.runtime.logprobs import TokenLogprob, log_normalizers, token_logprob
from onnxlm.runtime.randomness import uniforms
from onnxlm.runtime.row_history import RowHistory
from onnxlm.runtime.sampling import DrawSettings, check_logits, sample
from onnxlm.runtime.sampling_params import SamplingParams

# Steps whose random numbers are made at once.
_STEPS = 64


class TokenChooser:
    """Chooses tokens for the rows of one generation, each by its own settings.

    Args:
        params: Settings of each row.
        prompts: Every token that each row holds before the first new one.
        ends: Ids that end the text of each row.
        vocab_size: Tokens that the model knows.

    Attributes:
        needs_logits: False where the arg-max, which the graph gives, is all that is asked for.
        logprobs: Of each row, what is told of its new tokens; empty where nothing was asked for.

    Raises:
        InputError: A field names a token outside the vocabulary.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        ends: Sequence[Collection[int]],
        vocab_size: int,
    ) -> None:
        self._params = params
        self._draws = DrawSettings.of(params)
        self._drawing = not self._draws.greedy.all()
        self._rules = [
            LogitsRules(one, end, vocab_size) for one, end in zip(params, ends, strict=True)
        ]
        self._told = [one.logprobs for one in params]
        ruled = not all(rules.idle for rules in self._rules)
        self.needs_logits = ruled or self._drawing or any(count is not None for count in self._told)
        # Nobody looks at what rows hold where no rule does.
        self._histories = [RowHistory(prompt) for prompt in prompts] if ruled else None
        self._step = 0
        self._uniforms = np.zeros((len(params), 0))
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in params]

    @classmethod
    def greedy(cls, rows: int = 1) -> TokenChooser:
        """Takes the arg-max, whatever a row holds."""
        return cls([SamplingParams()] * rows, [()] * rows, [()] * rows, 0)

    def choose(self, logits: Floats, live: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The next token of every row that runs.

        Args:
            logits: float32 [rows, vocab_size].
            live: bool [rows], rows that run.

        Returns:
            int64 [rows]; 0 for a row that has ended.

        Raises:
            InputError: The model gave a row NaN, or its rules leave it no token.
        """
        rows = np.flatnonzero(live)
        everyone = rows.size == len(live)
        own = logits if everyone else logits[rows]
        check_logits(own)
        ruled = own
        if self._histories is not None:
            histories = [self._histories[row] for row in rows]
            ruled = apply_rules(own, [self._rules[row] for row in rows], histories)
            check_left(ruled, histories)
        settings = self._draws if everyone else self._draws.rows(rows)
        chosen = sample(ruled, settings, self._numbers()[rows])
        self._record(rows, chosen, own)
        if everyone:
            return chosen
        tokens = np.zeros(len(live), dtype=np.int64)
        tokens[rows] = chosen
        return tokens

    def _numbers(self) -> NDArray[np.float64]:
        """The random numbers of this step, float64 [rows]."""
        if not self._drawing:
            return np.zeros(len(self._params))
        inside = self._step % _STEPS
        if inside == 0:  # many at once cost hardly more than one
            steps = np.arange(self._step, self._step + _STEPS)
            self._uniforms = uniforms(self._draws.seeds[:, None], steps)
        self._step += 1
        return self._uniforms[:, inside]

    def _record(self, rows: NDArray[np.int64], chosen: NDArray[np.int64], logits: Floats) -> None:
        for place, row in enumerate(rows.tolist()):
            token_id, count = int(chosen[place]), self._told[row]
            if self._histories is not None:
                self._histories[row].append(token_id)
            if count is not None:
                (normalizer,) = log_normalizers(logits[place : place + 1])
                told = token_logprob(logits[place], float(normalizer), token_id, count)
                self.logprobs[row].append(told)
