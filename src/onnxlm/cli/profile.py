"""`onnxlm profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from onnxlm.cli.terminal import note, print_table, progress_bars
from onnxlm.errors import InputError

if TYPE_CHECKING:
    from onnxlm.runtime.profile_report import Profile as Report


@dataclass(frozen=True)
class Profile:
    """Show where the time of a package goes: by operator type, by layer, in prefill and in decoding.

    Runs prompts and decode steps under ONNX Runtime's profiler. "of roof" is the least time that the weights
    of a row would take at this machine's own rates, by the time that they took; rows without weights have
    none. What is no operator is shown too, so that the rows add up to the time that the token loop sees.
    """

    package: Annotated[
        Path, typer.Argument(metavar="PACKAGE", help="Folder of the package.", show_default=False)
    ]
    provider: Annotated[str, typer.Option(help="Execution provider, see `onnxlm providers`.")] = (
        "cpu"
    )
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompts.")] = 128
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate behind each.")] = 32
    batch: Annotated[int, typer.Option(min=1, help="Rows that run together.")] = 1
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is all cores.")] = 0
    repeats: Annotated[int, typer.Option(min=1, help="Runs that count.")] = 5
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page with plots and tables.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm profile smollm2-int8",
        "onnxlm profile smollm2-int8 --prompt-tokens 256 --html out.html",
    )

    def run(self) -> None:
        """Profile, print, write the page."""
        from onnxlm.cli.profile_page import profile_page
        from onnxlm.package import open_package
        from onnxlm.runtime.bench import Case
        from onnxlm.runtime.profile_run import profile
        from onnxlm.runtime.session import SessionConfig

        if self.html is not None and not self.html.absolute().parent.is_dir():
            raise InputError(f"{self.html}: there is no such folder", fix="make it first")
        config = SessionConfig(provider=self.provider, threads=self.threads)
        case = Case(self.prompt_tokens, self.new_tokens, self.batch)
        with progress_bars() as progress:
            report = profile(open_package(self.package), config, case, self.repeats, progress)
        if self.html is not None:
            self.html.write_text(profile_page(report), encoding="utf-8")
        if self.as_json:
            print(report.to_json())
        else:
            _print(report)


def _print(report: Report) -> None:
    print(report.summary())
    for table in report.tables():
        print(f"\n{table.title}")
        print_table(table.header, table.rows, left=table.left)
    for line in report.notes():
        note(line)
