"""`onnxlm generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from onnxlm.cli.terminal import note, print_json
from onnxlm.errors import InputError

if TYPE_CHECKING:
    from onnxlm.runtime import Generation, LanguageModel


@dataclass(frozen=True)
class Generate:
    """Continue a prompt. The text goes to standard output as it comes, one line on speed to standard error.

    What is not given is as the model's generation_config.json recommends.
    """

    package: Annotated[
        Path, typer.Argument(metavar="PACKAGE", help="Folder of the package.", show_default=False)
    ]
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT", help='Text to continue; "-" reads standard input.', show_default=False
        ),
    ]
    max_new_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 256
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many of the likeliest tokens; 0 is all.")
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the fewest tokens that hold this much of the probability."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Makes draws repeatable.")] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message: use the model's chat template.")
    ] = False
    provider: Annotated[str, typer.Option(help="Execution provider, see `onnxlm providers`.")] = (
        "cpu"
    )
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is all cores.")] = 0
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Run on the CPU where the provider cannot.")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when done, nothing before.")
    ] = False

    examples: ClassVar[tuple[str, ...]] = (
        'onnxlm generate smollm2-int8 "The capital of France is" --max-new-tokens 32',
        'onnxlm generate smollm2-int8 "Tell me a joke." --chat --temperature 0.7',
        "onnxlm generate smollm2-int8 - < prompt.txt",
    )

    def run(self) -> None:
        """Load, generate, report."""
        from onnxlm.runtime import load

        prompt = _standard_input() if self.prompt == "-" else self.prompt
        model = load(
            self.package,
            provider=self.provider,
            threads=self.threads,
            allow_fallback=self.allow_fallback,
        )
        start = model.chat().send if self.chat else model.stream
        stream = start(prompt, **self._fields())
        for piece in stream:
            if not self.as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if self.as_json:
            print_json(_facts(stream.result, model))
            return
        sys.stdout.write("\n")
        if model.fallback is not None:
            note(f"{model.provider} instead of {self.provider}: {model.fallback}")
        note(_speed_line(stream.result, model.provider))

    def _fields(self) -> dict[str, Any]:
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        return {name: getattr(self, name) for name in names}


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
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "ttft_ms": result.ttft_s * 1e3,
        "decode_tokens_per_s": result.decode_tokens_per_s,
        "provider": model.provider,
        "fallback": model.fallback,
    }


def _speed_line(result: Generation, provider: str) -> str:
    return (
        f"{provider}: TTFT {result.ttft_s * 1e3:.0f} ms for {result.prompt_tokens} prompt tokens, "
        f"{result.decode_tokens_per_s:.1f} tok/s, {len(result.token_ids)} new tokens "
        f"(ended by {result.finish_reason})"
    )
