"""`onnxlm verify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from onnxlm.cli.terminal import note, print_table, progress_bars

if TYPE_CHECKING:
    from onnxlm.proof import VerifyReport

FAILED = 1


@dataclass(frozen=True)
class Verify:
    """Prove a package against the full-precision model that it was made from; exit 1 when it fails.

    Packages in fp32 and fp16 are run beside PyTorch: every logit of a prompt, of a prompt in pieces, of
    decode steps and of a padded batch must agree, and so must 64 greedy tokens; where they do not, the
    first layer that differs is named. Packages below fp32 are measured on a text: KL divergence, top-1
    agreement and perplexity, through prefill and through decode; one that has collapsed fails.
    """

    package: Annotated[
        Path, typer.Argument(metavar="PACKAGE", help="Folder of the package.", show_default=False)
    ]
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="The full-precision model: folder, GGUF file, Hub id or package; by default what the "
            "package was made from.",
        ),
    ] = None
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to run, instead of the bundled one.")
    ] = None
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text that quality is measured on.")
    ] = 1024
    provider: Annotated[str, typer.Option(help="Execution provider, see `onnxlm providers`.")] = (
        "cpu"
    )
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is all cores.")] = 0
    record: Annotated[
        bool, typer.Option("--record", help="Write the figures into the package when it passes.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm verify smollm2-fp32 --reference SmolLM2-135M-Instruct.Q4_1.gguf",
        "onnxlm verify smollm2-int8 --reference smollm2-fp32 --text my-text.txt",
    )

    def run(self) -> None:
        """Verify, report, and fail if the package does."""
        from onnxlm.cli.text_file import read_text
        from onnxlm.package import record_figures
        from onnxlm.verification import VerifyOptions, verify

        options = VerifyOptions(
            reference=self.reference,
            text=None if self.text is None else read_text(self.text),
            tokens=self.tokens,
            provider=self.provider,
            threads=self.threads,
        )
        with progress_bars() as progress:
            report = verify(self.package, options, progress)
        if self.as_json:
            print(report.to_json())
        else:
            _print(report)
        if not report.ok:
            raise SystemExit(FAILED)
        if self.record:
            quality, parity = report.figures()
            record_figures(self.package, quality=quality or None, parity=parity or None)
            note(f"recorded in {self.package}")


def _print(report: VerifyReport) -> None:
    from onnxlm.proof import CHECK_HEADER, QUALITY_HEADER

    print(
        f"{report.package}: {report.precision}, lowering {report.lowering}, on {report.provider}\n"
        f"reference: {report.reference}\n"
        f"text: {report.text}\n"
    )
    if report.checks:
        print_table(CHECK_HEADER, report.check_rows(), left=2)
    if report.checks and report.quality:
        print()
    if report.quality:
        print_table(QUALITY_HEADER, report.quality_rows(), left=2)
    if report.divergence is not None:
        print(f"\n{report.divergence}")
    print(f"\n{'ok' if report.ok else 'FAILED'}")
