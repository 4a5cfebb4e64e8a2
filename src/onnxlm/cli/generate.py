"""`onnxlm generate`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from onnxlm.cli.generation_options import SamplingOptions, SessionOptions, speed_line
from onnxlm.cli.sampling_options import read_ids
from onnxlm.cli.terminal import note, print_json, progress_bars
from onnxlm.errors import InputError

if TYPE_CHECKING:
    from onnxlm.runtime import Generation, LanguageModel


@dataclass(frozen=True)
class Generate(SamplingOptions, SessionOptions):
    """Continue a prompt. The text goes to standard output as it comes, one line on speed to standard error.

    What is not given is as the model's generation_config.json recommends.
    """

    package: Annotated[
        Path, typer.Argument(metavar="PACKAGE", help="Folder of the package.", show_default=False)
    ]
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help='Text to continue; "-" reads standard input.', show_default=False
        ),
    ] = None
    ids: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID", help="The prompt as token ids, instead of a text.", show_default=False
        ),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message: use the model's chat template.")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when done, nothing before.")
    ] = False

    examples: ClassVar[tuple[str, ...]] = (
        'onnxlm generate smollm2-int8 "The capital of France is" --max-new-tokens 32',
        'onnxlm generate smollm2-int8 "Tell me a joke." --chat --temperature 0.7',
        'onnxlm generate smollm2-int8 "Once upon a time" --num-beams 4',
        'onnxlm generate smollm2-int8 "1, 2, 3," --stop-strings 10 --logprobs 3',
        "onnxlm generate smollm2-int8 - < prompt.txt",
        "onnxlm generate my-model-fp32 --ids 17,4,9 --max-new-tokens 32",
    )

    def run(self) -> None:
        """Load, generate, report."""
        text, ids = self._prompt()
        model = self.load(self.package)
        fields = self.sampling_fields()
        if self.chat:
            stream = model.chat().send(text, **fields)
        else:
            stream = model.stream(text if ids is None else ids, **fields)
        with progress_bars() as model.progress:  # gone before any text shows
            first = next(stream, "")
        for piece in chain([first], stream):
            if not self.as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if self.as_json:
            print_json(_facts(stream.result, model))
            return
        if not model.tokenizer.has_text:
            sys.stdout.write(_shown(stream.result))
        sys.stdout.write("\n")
        for number, other in enumerate(stream.result.alternatives, 2):
            print(f"--- {number}\n{_shown(other)}")
        for line in _logprob_lines(stream.result, model):
            note(line)
        if model.fallback is not None:
            note(f"{model.provider} instead of {self.provider}: {model.fallback}")
        note(speed_line(stream.result, model.provider))

    def _prompt(self) -> tuple[str, list[int] | None]:
        """The text, or the ids; exactly one is given."""
        if (self.prompt is None) == (self.ids is None) or (self.chat and self.prompt is None):
            raise InputError(
                "the prompt", allowed="a text" + (" with --chat" if self.chat else ", or --ids")
            )
        if self.ids is not None:
            return "", read_ids("--ids", self.ids)
        return _standard_input() if self.prompt == "-" else str(self.prompt), None


def _shown(result: Generation) -> str:
    """The text, or where there is none the ids, as `--ids` takes them."""
    if result.decoded is not None:
        return result.decoded
    return ",".join(map(str, result.token_ids))


def _standard_input() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            "the prompt on standard input is not UTF-8", found=f"byte {error.start}"
        ) from error
    return text.removesuffix("\n")


def _facts(result: Generation, model: LanguageModel) -> dict[str, Any]:
    return {
        **_sequence_facts(result),
        "prompt_tokens": result.prompt_tokens,
        "ttft_ms": result.ttft_s * 1e3,
        "decode_tokens_per_s": result.decode_tokens_per_s,
        "alternatives": [_sequence_facts(other) for other in result.alternatives],
        "provider": model.provider,
        "fallback": model.fallback,
    }


def _sequence_facts(result: Generation) -> dict[str, Any]:
    """What is told of one sequence; a log-probability of minus infinity, which JSON lacks, is null."""
    facts = {
        "text": result.decoded,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "score": result.score,
    }
    told = result.logprobs
    if told is None:
        return facts
    pairs = [((one.token_id, one.logprob), *one.top) for one in told]
    rows = [[{"token_id": i, "logprob": _finite(value)} for i, value in row] for row in pairs]
    return facts | {"logprobs": [{**chosen, "top": top} for chosen, *top in rows]}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _logprob_lines(result: Generation, model: LanguageModel) -> Iterator[str]:
    """A line for each token: its text and log-probability, then the likeliest tokens'."""
    decode = model.tokenizer.decode if model.tokenizer.has_text else None
    for told in result.logprobs or ():
        pairs = ((told.token_id, told.logprob), *told.top)
        yield "  ".join(
            f"{i if decode is None else repr(decode([i], skip_special_tokens=False))} {value:.3f}"
            for i, value in pairs
        )
