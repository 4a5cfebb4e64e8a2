"""`onnxlm eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from onnxlm.cli.terminal import print_json, print_table, progress_bars

if TYPE_CHECKING:
    from onnxlm.evaluation import EvalReport

FAILED = 1


@dataclass(frozen=True)
class Eval:
    """Measure how well a package foresees a text, and how far it is from another model.

    A long text is run in windows; each token is predicted once, and behind the first window from more than
    WINDOW - STRIDE tokens before it. With --against the same positions are run through the other model too:
    KL divergence and top-1 agreement over all of them, and how many greedily decoded tokens are those that
    the other model would have given, up to the first that is not. Exit 1 when the package has collapsed.
    """

    package: Annotated[
        Path, typer.Argument(metavar="PACKAGE", help="Folder of the package.", show_default=False)
    ]
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to run, instead of the bundled one.")
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Another model: package of any precision, folder, GGUF file or Hub id.",
        ),
    ] = None
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of the text at most; all if not given.")
    ] = None
    window: Annotated[
        int | None,
        typer.Option(help="Tokens that run together; 1024 or the context, if that is shorter."),
    ] = None
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next; half a window.")
    ] = None
    provider: Annotated[str, typer.Option(help="Execution provider, see `onnxlm providers`.")] = (
        "cpu"
    )
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is all cores.")] = 0
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm eval smollm2-int8 --text my-text.txt",
        "onnxlm eval smollm2-int4 --against smollm2-fp32",
        "onnxlm eval smollm2-int4 --against smollm2-int8 --window 512 --stride 128",
    )

    def run(self) -> None:
        """Measure, report, and fail if the package is useless."""
        from onnxlm.cli.text_file import read_text
        from onnxlm.evaluation import EvalOptions, evaluate

        options = EvalOptions(
            text=None if self.text is None else read_text(self.text),
            against=self.against,
            tokens=self.tokens,
            window=self.window,
            stride=self.stride,
            provider=self.provider,
            threads=self.threads,
        )
        with progress_bars() as progress:
            report = evaluate(self.package, options, progress)
        if self.as_json:
            print_json(report.to_dict())
        else:
            _print(report)
        if not report.ok:
            raise SystemExit(FAILED)


def _print(report: EvalReport) -> None:
    print(
        f"{report.package}: {report.precision}, on {report.provider}\n"
        f"text: {report.text}, {report.tokens} tokens; "
        f"windows: {report.windows} of {report.window} tokens, stride {report.stride}"
    )
    if report.comparison is not None:
        print(f"against: {report.comparison.against}")
    print()
    print_table(("figure", "value"), _rows(report))


def _rows(report: EvalReport) -> list[tuple[str, str]]:
    rows = [("perplexity", f"{report.perplexity:#.4g}"), ("nats a token", f"{report.loss:.4f}")]
    if report.comparison is None:
        return rows
    found, greedy = report.comparison.quality, report.comparison.greedy
    return [
        *rows,
        ("perplexity of the other", f"{found.perplexity_reference:#.4g}"),
        ("change of perplexity", f"{found.perplexity_change:+.2%}"),
        ("KL, mean", f"{found.kl:.4f}"),
        ("KL, 99th percentile", f"{report.comparison.kl_p99:.4f}"),
        ("KL, largest", f"{found.kl_max:.4f}"),
        ("top-1 agreement", f"{found.top1:.3f}"),
        (f"greedy tokens agreed of {greedy.tokens}, mean", f"{greedy.mean:.1f}"),
        (f"greedy tokens agreed of {greedy.tokens}, least", f"{greedy.least}"),
        ("verdict", found.verdict),
    ]
