"""The settings of a generation, under the names of Hugging Face's generation_config.json."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxlm.errors import OnnxlmWarning
from onnxlm.runtime.generation_fields import (
    biases,
    checked,
    flag,
    number,
    one_of,
    refused,
    setting,
    strings,
    token_biases,
    token_ids,
    token_lists,
    whole,
    whole_or,
)

# Fields of a generation_config.json that would change which tokens come and are not carried out, and the
# values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "constraints": ([],),
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "top_h": (),
    "watermarking_config": (),
}
# What a package ends a text with is read from all of its files (`stopping.read_eos_token_ids`).
_READ_ELSEWHERE = frozenset({"eos_token_id"})
# Asking for one of these asks for draws.
_OF_DRAWS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p"})
_SEEDS = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one row are chosen and how many are wanted.

    Rules apply in this order: sequence_bias and logit_bias, repetition_penalty, presence_penalty and
    frequency_penalty, what may not come at all; then, where tokens are drawn, top_k, temperature, top_p,
    min_p, typical_p, each on the mass that the ones before it left.

    Attributes:
        do_sample: Draw at random; otherwise the largest logit is taken.
        temperature: Divides the logits; 0 takes the largest.
        top_k: Only this many of the largest logits can be drawn; 0 means all.
        top_p: Only the fewest tokens with at least this share of the mass can be drawn, and one at the least.
        min_p: Only tokens at least this many times as likely as the likeliest can be drawn; 0 means all.
        typical_p: Only the tokens whose surprise is nearest to the expected one can be drawn, the fewest with
            at least this share of the mass (Meister et al. 2022); 1 means all.
        repetition_penalty: Divides positive logits of tokens that the row holds, prompt included, and
            multiplies negative ones (Keskar et al. 2019); 1 changes nothing.
        presence_penalty: Taken from the logits of tokens that the row holds, prompt included.
        frequency_penalty: The same, times how often the row holds the token.
        no_repeat_ngram_size: No so many tokens in a row come twice, prompt included; 0 is off.
        sequence_bias: Pairs (ids, bias): the bias is added to the logit of the last id where the row ends in
            the others.
        logit_bias: Pairs (id, bias), or a mapping: added to that token's logit at every step.
        bad_words_ids: Sequences of ids that never come.
        suppress_tokens: Tokens that never come.
        begin_suppress_tokens: Tokens that do not come first.
        min_new_tokens: Nothing that ends a text comes before so many new tokens.
        min_length: The same, the prompt counted too.
        seed: Makes draws repeatable; None takes a fresh one.
        max_new_tokens: Tokens to generate at most; None goes on to the end of the context.
        eos_token_id: Ids that end the text, in place of the package's own; None leaves those.
        stop_strings: The text ends before the first of these to be complete.
        stop_token_ids: Ids that end the text and have no part in it.
        logprobs: How many of the likeliest tokens are told of with each chosen one; None tells of none.
        num_beams: Sequences that beam search keeps; 1 is no beam search.
        num_return_sequences: Sequences wanted of each prompt, from one beam search or by as many draws.
        prompt_lookup_num_tokens: Most tokens of a row that are guessed from what it has said before, and
            looked at in one call; "auto" sets no limit, None guesses none. What is chosen, and by which rule,
            stays the same but for the rounding of several tokens at once, see `speculation`.
        length_penalty: Beams are compared by log-probability over length to this power.
        early_stopping: When beam search ends: true, with num_beams complete sequences; false, when no other
            is expected to become better; "never", when none can.

    Raises:
        InputError: A field has a wrong type or is out of its bounds; it is named with what is allowed.
    """

    do_sample: bool = setting(False, flag())
    temperature: float = setting(1.0, number("a number from 0 (greedy) up", 0))
    top_k: int = setting(0, whole("an integer from 0 (off) up", 0))
    top_p: float = setting(1.0, number("a number from 0 to 1 (off)", 0, 1))
    min_p: float = setting(0.0, number("a number from 0 (off) to 1", 0, 1))
    typical_p: float = setting(1.0, number("a number above 0, up to 1 (off)", 0, 1, above=True))
    repetition_penalty: float = setting(1.0, number("a number above 0", 0, above=True))
    presence_penalty: float = setting(0.0, number("a number from -100 to 100", -100, 100))
    frequency_penalty: float = setting(0.0, number("a number from -100 to 100", -100, 100))
    no_repeat_ngram_size: int = setting(0, whole("an integer from 0 (off) up", 0))
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = setting((), biases())
    logit_bias: tuple[tuple[int, float], ...] = setting((), token_biases())
    bad_words_ids: tuple[tuple[int, ...], ...] = setting((), token_lists())
    suppress_tokens: tuple[int, ...] = setting((), token_ids())
    begin_suppress_tokens: tuple[int, ...] = setting((), token_ids())
    min_new_tokens: int = setting(0, whole("an integer from 0 up", 0))
    min_length: int = setting(0, whole("an integer from 0 up", 0))
    seed: int | None = setting(None, whole(f"an integer from 0 to {_SEEDS - 1}", 0, _SEEDS - 1))
    max_new_tokens: int | None = setting(None, whole("an integer from 0 up", 0))
    eos_token_id: tuple[int, ...] | None = setting(None, token_ids())
    stop_strings: tuple[str, ...] = setting((), strings())
    stop_token_ids: tuple[int, ...] = setting((), token_ids())
    logprobs: int | None = setting(None, whole("an integer from 0 (the chosen token alone) up", 0))
    num_beams: int = setting(1, whole("an integer from 1 (off) up", 1))
    num_return_sequences: int = setting(1, whole("an integer from 1 up", 1))
    prompt_lookup_num_tokens: int | str | None = setting(None, whole_or("auto", 1))
    length_penalty: float = setting(1.0, number("a number from -100 to 100", -100, 100))
    early_stopping: bool | str = setting(
        False, one_of('true, false or "never"', True, False, "never")
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(field, getattr(self, field.name)))
        if self.num_beams > 1 and not self.greedy:
            raise refused("num_beams", self.num_beams, "1 where tokens are drawn (do_sample)")
        if self.num_beams > 1 and self.stop_strings:
            raise refused("stop_strings", list(self.stop_strings), "none in beam search")
        if self.num_beams > 1 and self.prompt_lookup_num_tokens is not None:
            asked = self.prompt_lookup_num_tokens
            raise refused("prompt_lookup_num_tokens", asked, "none in beam search")
        if self.greedy and self.num_return_sequences > self.num_beams:
            allowed = f"up to num_beams ({self.num_beams}) where no token is drawn"
            raise refused("num_return_sequences", self.num_return_sequences, allowed)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, so that neither seed nor logits' sizes matter."""
        return not self.do_sample or self.temperature == 0 or self.top_k == 1

    @classmethod
    def from_generation_config(cls, raw: Mapping[str, Any]) -> SamplingParams:
        """The settings a model recommends; a null counts as absent.

        Warns of fields that would change the tokens and are not carried out.

        Args:
            raw: A parsed generation_config.json.

        Raises:
            InputError: A field is out of its bounds.
        """
        ignored = {
            name: raw[name]
            for name, neutral in _NEUTRAL.items()
            if raw.get(name) is not None and raw[name] not in neutral
        }
        names = {field.name for field in dataclasses.fields(cls)} - _READ_ELSEWHERE
        known = {key: value for key, value in raw.items() if key in names and value is not None}
        if known.get("do_sample") is True and known.get("num_beams", 1) != 1:
            ignored["num_beams"] = known.pop("num_beams")  # beams that are drawn
        if ignored:
            told = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
            warnings.warn(
                f"generation_config fields not carried out: {told}", OnnxlmWarning, stacklevel=2
            )
        return cls(**known)

    def with_overrides(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """These settings with what a caller asked for; None stands for "not asked".

        Asking for a temperature, top_k, top_p, min_p or typical_p asks for draws, and asking for beams asks
        for none, unless do_sample is given too.

        Raises:
            InputError: A field is unknown or out of its bounds.
        """
        given = {key: value for key, value in overrides.items() if value is not None}
        names = [field.name for field in dataclasses.fields(self)]
        for name, value in given.items():
            if name not in names:
                raise refused(name, value, "the fields " + ", ".join(names))
        if given.keys() & _OF_DRAWS:
            given.setdefault("do_sample", True)
        elif given.get("num_beams", 1) != 1:
            given.setdefault("do_sample", False)
        if given.get("do_sample") is True:
            given.setdefault("num_beams", 1)
        elif given.get("do_sample") is False and self.do_sample:
            given.setdefault("num_return_sequences", 1)
        return dataclasses.replace(self, **given)


def params_of_rows(
    defaults: SamplingParams, overrides: Mapping[str, Any], rows: int
) -> list[SamplingParams]:
    """The settings of each row of a batch.

    One seed for all gives the row behind `n` sequences of rows before it that seed plus `n`.

    Args:
        defaults: What holds where a caller asked for nothing.
        overrides: What was asked for; a list with a value for each row where rows differ.
        rows: Rows of the batch.

    Raises:
        InputError: A field is unknown or out of its bounds, or a list is not as long as the batch.
    """
    kinds = {field.name: field.metadata["kind"] for field in dataclasses.fields(SamplingParams)}
    asked: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, value in overrides.items():
        each = name in kinds and kinds[name].one_a_row(value)
        if each and len(value) != rows:
            raise refused(name, value, f"one value, or a list of {rows}: one for each prompt")
        for row in range(rows):
            asked[row][name] = value[row] if each else value
    params = [defaults.with_overrides(fields) for fields in asked]
    if kinds["seed"].one_a_row(overrides.get("seed")):
        return params
    before = 0
    for row, one in enumerate(params):
        if one.seed is not None:
            params[row] = dataclasses.replace(one, seed=(one.seed + before) % _SEEDS)
        before += one.num_return_sequences
    return params
