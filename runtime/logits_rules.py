"""The rules that look at what a row holds, put together for the rows of a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from onnxlm.errors import InputError
from onnxlm.runtime.arrays import Ids
from onnxlm.runtime.bans import ban, completed, repeated_ngrams
from onnxlm.runtime.generation_fields import refused
from onnxlm.runtime.penalties import (
    Bias,
    Logits,
    add_biases,
    penalize_counts,
    penalize_repetition,
)
from onnxlm.runtime.row_history import RowHistory
from onnxlm.runtime.sampling_params import SamplingParams


class LogitsRules:
    """What the settings of one row say of its next token before any draw.

    Args:
        params: The row's settings.
        ends: Ids that end the row's text.
        vocab_size: Tokens that the model knows.

    Attributes:
        params: As given.
        idle: Whether no rule changes any logit.

    Raises:
        InputError: A field names a token outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, ends: Collection[int], vocab_size: int) -> None:
        _check_ids(params, vocab_size)
        self.params = params
        singles = (((token_id,), bias) for token_id, bias in params.logit_bias)
        self.biases: tuple[Bias, ...] = (*params.sequence_bias, *singles)
        # A package may name an end that its vocabulary has not: it never comes.
        self._ends = sorted(token_id for token_id in ends if token_id < vocab_size)
        # A whole text may be forbidden, but never that texts end.
        self._bad_words = [ids for ids in params.bad_words_ids if ids[0] not in ends or ids[1:]]
        self.counts = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.bans = bool(
            self._bad_words
            or params.suppress_tokens
            or params.begin_suppress_tokens
            or params.no_repeat_ngram_size
            or (ends and (params.min_new_tokens or params.min_length))
        )
        changed = self.biases or self.counts or self.bans or params.repetition_penalty != 1.0
        self.idle = not changed

    def banned(self, history: RowHistory) -> Ids:
        """The tokens that may not come next, int64 [n]."""
        params, held, ids = self.params, history.ids, list(self.params.suppress_tokens)
        ids += completed(held, self._bad_words)
        if history.new_tokens == 0:
            ids += params.begin_suppress_tokens
        if history.new_tokens < params.min_new_tokens or held.size < params.min_length:
            ids += self._ends
        if params.no_repeat_ngram_size:
            ids += repeated_ngrams(held, params.no_repeat_ngram_size).tolist()
        return np.array(ids, dtype=np.int64)


def apply_rules(
    logits: Logits, rules: Sequence[LogitsRules], histories: Sequence[RowHistory]
) -> Logits:
    """Logits by every rule in order; the same array where no rule changes any.

    Args:
        logits: float [rows, vocab_size].
        rules: Of each row.
        histories: What each row holds.

    Returns:
        float [rows, vocab_size]; all -inf in a row that is left no token, see `check_left`.
    """
    if all(one.idle for one in rules):
        return logits
    if any(one.biases for one in rules):
        held = [history.ids for history in histories]
        logits = add_biases(logits, held, [one.biases for one in rules])
    repetition = [one.params.repetition_penalty for one in rules]
    if any(penalty != 1.0 for penalty in repetition):
        different = [history.counts()[0] for history in histories]
        logits = penalize_repetition(logits, different, repetition)
    if any(one.counts for one in rules):
        logits = penalize_counts(
            logits,
            [history.counts() for history in histories],
            [one.params.presence_penalty for one in rules],
            [one.params.frequency_penalty for one in rules],
        )
    if any(one.bans for one in rules):
        pairs = zip(rules, histories, strict=True)
        logits = ban(logits, [one.banned(history) for one, history in pairs])
    return logits


def check_left(logits: Logits, histories: Sequence[RowHistory]) -> None:
    """Look whether rules leave anything to choose from.

    Args:
        logits: float [choices, n]; of each row one is chosen.
        histories: What is held where each choice is made.

    Raises:
        InputError: They do not.
    """
    left = np.isfinite(logits.max(axis=1))
    if not left.all():
        raise InputError(
            "the generation fields leave no token to choose from",
            found=f"all banned at token {histories[int(left.argmin())].new_tokens}",
            fix="ban fewer tokens",
        )


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for name, token_id in _named_ids(params):
        if token_id >= vocab_size:
            raise refused(name, token_id, f"token ids from 0 to {vocab_size - 1}")


def _named_ids(params: SamplingParams) -> Iterator[tuple[str, int]]:
    """Every token id that a field names, by the field."""
    lists: dict[str, Sequence[Sequence[int]]] = {
        "sequence_bias": [ids for ids, _ in params.sequence_bias],
        "logit_bias": [[token_id] for token_id, _ in params.logit_bias],
        "bad_words_ids": params.bad_words_ids,
        "suppress_tokens": [params.suppress_tokens],
        "begin_suppress_tokens": [params.begin_suppress_tokens],
        "eos_token_id": [params.eos_token_id or ()],
        "stop_token_ids": [params.stop_token_ids],
    }
    for name, sequences in lists.items():
        for ids in sequences:
            for token_id in ids:
                yield name, token_id
