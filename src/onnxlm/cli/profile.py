"""`onnxlm profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from onnxlm.cli.device_options import PlaceOptions
from onnxlm.cli.output_files import write_files
from onnxlm.cli.terminal import note, print_table, progress_bars
from onnxlm.whole_file import check_target

if TYPE_CHECKING:
    from onnxlm.runtime.profile_report import Profile as Report
    from onnxlm.runtime.session import SessionConfig


@dataclass(frozen=True)
class Profile(PlaceOptions):
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
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Run on the CPU where the provider cannot.")
    ] = False
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
        from onnxlm.runtime.memory_budget import read_bytes
        from onnxlm.runtime.profile_run import profile

        if self.html is not None:
            check_target(self.html)
        case = Case(self.prompt_tokens, self.new_tokens, self.batch)
        with progress_bars() as progress:
            report = profile(
                open_package(self.package),
                self._config(),
                case,
                self.repeats,
                progress,
                kv_budget=read_bytes(self.kv_budget),
            )
        try:
            if self.as_json:
                print(report.to_json())
            else:
                _print(report)
        finally:  # a reader that has gone away (`| head`) takes no file along
            if self.html is not None:
                write_files([(self.html, lambda: profile_page(report))])

    def _config(self) -> SessionConfig:
        from onnxlm.runtime.session import SessionConfig

        return SessionConfig(
            provider=self.provider,
            device_id=self.device_id,
            threads=self.threads,
            allow_fallback=self.allow_fallback,
            gpu_mem_limit=self.memory_limit,
        )


def _print(report: Report) -> None:
    print(report.summary())
    for table in report.tables():
        print(f"\n{table.title}")
        print_table(table.header, table.rows, left=table.left)
    for line in report.notes():
        note(line)
