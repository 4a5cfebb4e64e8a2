"""Fields of `SamplingParams` as options of a command line, in groups.

The annotations are evaluated in the modules of the commands, so they are made of literals, `Annotated` and
`typer` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from onnxlm.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """How a token is drawn."""

    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", rich_help_panel="Draws")
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Draw from this many of the likeliest tokens; 0 is all.", rich_help_panel="Draws"
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the fewest tokens that hold this much of the probability.",
            rich_help_panel="Draws",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from tokens at least this many times as likely as the likeliest.",
            rich_help_panel="Draws",
        ),
    ] = None
    typical_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the most typical tokens that hold this much of the probability.",
            rich_help_panel="Draws",
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Makes draws repeatable.", rich_help_panel="Draws")
    ] = None
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--greedy",
            help="Draw, or take the likeliest token.",
            rich_help_panel="Draws",
            show_default=False,
        ),
    ] = None
    num_return_sequences: Annotated[
        int | None,
        typer.Option(help="Sequences wanted, drawn or of beams.", rich_help_panel="Draws"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PenaltyOptions:
    """Which tokens are less likely, or may not come."""

    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1 makes tokens that came less likely.", rich_help_panel="Penalties and bans"
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            help="Taken from logits of tokens that came.", rich_help_panel="Penalties and bans"
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            help="Taken for every time that a token came.", rich_help_panel="Penalties and bans"
        ),
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None,
        typer.Option(
            help="No so many tokens in a row come twice.", rich_help_panel="Penalties and bans"
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS",
            help="Added to a token's logit; may be repeated.",
            rich_help_panel="Penalties and bans",
        ),
    ] = None
    sequence_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID,ID=BIAS",
            help="Added to the last token of a sequence; may be repeated.",
            rich_help_panel="Penalties and bans",
        ),
    ] = None
    bad_words_ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID,ID",
            help="A sequence that never comes; may be repeated.",
            rich_help_panel="Penalties and bans",
        ),
    ] = None
    suppress_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID", help="Tokens that never come.", rich_help_panel="Penalties and bans"
        ),
    ] = None
    begin_suppress_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID",
            help="Tokens that do not come first.",
            rich_help_panel="Penalties and bans",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EndOptions:
    """When a text ends."""

    max_new_tokens: Annotated[
        int, typer.Option(help="New tokens at most.", rich_help_panel="End of the text")
    ] = 256
    min_new_tokens: Annotated[
        int | None,
        typer.Option(help="New tokens at least.", rich_help_panel="End of the text"),
    ] = None
    min_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens at least, the prompt counted too.", rich_help_panel="End of the text"
        ),
    ] = None
    stop_strings: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="The text ends before this; may be repeated.",
            rich_help_panel="End of the text",
        ),
    ] = None
    stop_token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID",
            help="Tokens that end the text and are no part of it.",
            rich_help_panel="End of the text",
        ),
    ] = None
    eos_token_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID",
            help="Tokens that end the text, instead of the package's own; none where empty.",
            rich_help_panel="End of the text",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """Beam search, what is told of each token, and guessing ahead."""

    num_beams: Annotated[
        int | None,
        typer.Option(help="Sequences that beam search keeps; 1 is off.", rich_help_panel="Beams"),
    ] = None
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Scores are log-probabilities over length to this power.", rich_help_panel="Beams"
        ),
    ] = None
    early_stopping: Annotated[
        str | None,
        typer.Option(
            metavar="true|false|never", help="When beam search ends.", rich_help_panel="Beams"
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Tell each token's log-probability, and those of so many of the likeliest.",
            show_default=False,
        ),
    ] = None
    prompt_lookup_num_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Guess so many tokens at once from what the text has said before.",
            show_default=False,
        ),
    ] = None


def read_fields(options: object, groups: tuple[type, ...]) -> dict[str, Any]:
    """The fields that `options` gives, as `LanguageModel.generate` takes them.

    Raises:
        InputError: An option cannot be read.
    """
    names = [field.name for group in groups for field in dataclasses.fields(group)]
    given = {name: getattr(options, name) for name in names}
    return {name: _read(name, value) for name, value in given.items() if value not in (None, [])}


def read_ids(option: str, text: str) -> list[int]:
    """Token ids with commas between them.

    Raises:
        InputError: They are not; the option is named.
    """
    try:
        return _ids(text)
    except ValueError as error:
        raise InputError(f"option {option}", found=text, allowed=_SOME_IDS) from error


def _read(name: str, value: Any) -> Any:
    read = _READERS.get(name)
    if read is None:
        return value
    try:
        return read(value)
    except ValueError as error:
        option = "--" + name.replace("_", "-")
        raise InputError(f"option {option}", found=value, allowed=_ALLOWED[name]) from error


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")] if text else []


def _lists(texts: list[str]) -> list[list[int]]:
    return [_ids(text) for text in texts]


def _biases(texts: list[str]) -> list[list[Any]]:
    pairs = [text.rpartition("=") for text in texts]
    return [[_ids(ids), float(bias)] for ids, _, bias in pairs]


def _single_biases(texts: list[str]) -> dict[int, float]:
    pairs = [text.rpartition("=") for text in texts]
    return {int(token_id): float(bias) for token_id, _, bias in pairs}


def _early_stopping(text: str) -> bool | str:
    words: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in words:
        raise ValueError
    return words[text]


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": _single_biases,
    "sequence_bias": _biases,
    "bad_words_ids": _lists,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "stop_token_ids": _ids,
    "eos_token_id": _ids,
    "early_stopping": _early_stopping,
}
_SOME_IDS = "token ids with commas between them, as in 4,2"
_ALLOWED = {
    "logit_bias": "a token id, an equals sign and a number, as in 42=-1.5",
    "sequence_bias": "token ids, an equals sign and a number, as in 4,2=-1.5",
    "early_stopping": "true, false or never",
} | dict.fromkeys(
    ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_token_ids", "eos_token_id"),
    _SOME_IDS,
)
