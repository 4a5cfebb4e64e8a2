"""The settings of a generation, under the names of Hugging Face's generation_config.json."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from onnxlm.errors import InputError, OnnxlmWarning

# Fields of a generation_config.json that would change which tokens come, and the values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "repetition_penalty": (1.0,),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1.0,),
}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and how many are wanted.

    Attributes:
        do_sample: Draw at random; otherwise the largest logit is taken.
        temperature: Divides the logits; 0 takes the largest.
        top_k: Only this many of the largest logits can be drawn; 0 means all.
        top_p: Only the fewest tokens with at least this share of the mass can be drawn, and one at the least.
        seed: Makes draws repeatable; None takes a fresh one.
        max_new_tokens: Tokens to generate at most; None goes on to the end of the context.

    Raises:
        InputError: A field has a wrong type or is out of its bounds; it is named with what is allowed.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.do_sample, bool):
            raise _refused("do_sample", self.do_sample, "true or false")
        if not _is_real(self.temperature) or not 0 <= self.temperature < math.inf:
            raise _refused("temperature", self.temperature, "a number from 0 (greedy) up")
        if not _is_integer(self.top_k) or self.top_k < 0:
            raise _refused("top_k", self.top_k, "an integer from 0 (off) up")
        if not _is_real(self.top_p) or not 0 <= self.top_p <= 1:
            raise _refused("top_p", self.top_p, "a number from 0 to 1 (off)")
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= self.seed < 2**64):
            raise _refused("seed", self.seed, f"an integer from 0 to {2**64 - 1}")
        if self.max_new_tokens is not None and not (
            _is_integer(self.max_new_tokens) and self.max_new_tokens >= 0
        ):
            raise _refused("max_new_tokens", self.max_new_tokens, "an integer from 0 up")

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
        ignored = [
            f"{name}={raw[name]!r}"
            for name, neutral in _NEUTRAL.items()
            if raw.get(name) is not None and raw[name] not in neutral
        ]
        if ignored:
            warnings.warn(
                f"generation_config fields not carried out: {', '.join(ignored)}",
                OnnxlmWarning,
                stacklevel=2,
            )
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(
            **{key: value for key, value in raw.items() if key in names and value is not None}
        )

    def with_overrides(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """These settings with what a caller asked for; None stands for "not asked".

        Asking for a temperature, top_k or top_p asks for sampling, unless do_sample is given too.

        Raises:
            InputError: A field is unknown or out of its bounds.
        """
        given = {key: value for key, value in overrides.items() if value is not None}
        names = [field.name for field in dataclasses.fields(self)]
        for name, value in given.items():
            if name not in names:
                raise _refused(name, value, "the fields " + ", ".join(names))
        if given.keys() & {"temperature", "top_k", "top_p"}:
            given.setdefault("do_sample", True)
        return dataclasses.replace(self, **given)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _refused(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"generation field '{name}'", found=repr(value), allowed=allowed)
