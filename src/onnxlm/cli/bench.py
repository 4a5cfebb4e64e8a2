"""`onnxlm bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from onnxlm.cli.device_options import DeviceOptions
from onnxlm.cli.faults import BAD_INPUT, INTERRUPTED
from onnxlm.cli.output_files import write_files
from onnxlm.cli.terminal import note, print_table, progress_bars
from onnxlm.errors import InputError
from onnxlm.whole_file import check_target

if TYPE_CHECKING:
    from onnxlm.cli.bench_options import Contestants
    from onnxlm.runtime.bench_report import Report
    from onnxlm.runtime.bench_tables import Table


@dataclass(frozen=True)
class Bench(DeviceOptions):
    """Measure speed, memory and load time of packages, side by side.

    Each package runs on each provider with each number of threads, and each of these runs every combination
    of prompt length, new tokens and batch. All are processes of their own and take turns in rounds, so that
    a machine that gets slower or busier hits all alike; numbers are medians over the rounds with the lowest
    and highest in brackets. A round before them is not counted. Prompts are English text in the package's
    own tokens; generation is greedy and goes on past end-of-text tokens. In the same rounds the machine's
    own rates are taken; "of roof" is the least time at these rates by the time that it took. Load time,
    first run and memory are measured before the rounds. KL and top-1 are those that the package's manifest
    holds. Ctrl-C ends the run and shows what is done. docs/benchmarking.md says more.
    """

    packages: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PACKAGE...",
            help="Folders of packages; with --compare also one report, which nothing is run for.",
            show_default=False,
        ),
    ] = None
    provider: Annotated[
        str, typer.Option(metavar="NAME,...", help="Execution providers, see `onnxlm providers`.")
    ] = "cpu"
    prompt_tokens: Annotated[str, typer.Option(metavar="N,...", help="Lengths of prompts.")] = "128"
    new_tokens: Annotated[
        str, typer.Option(metavar="N,...", help="Tokens to generate in each run.")
    ] = "128"
    batch: Annotated[str, typer.Option(metavar="N,...", help="Rows that run together.")] = "1"
    threads: Annotated[
        str, typer.Option(metavar="N,...", help="Threads inside an operator; 0 is all cores.")
    ] = "0"
    context_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Also measure decode speed with so many tokens in the cache."
        ),
    ] = None
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Also run the PyTorch model (fp32) of the packages' source: torch, torch.compile.",
        ),
    ] = None
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROVIDER=PATH",
            help="Run a provider under another interpreter, whose onnxruntime has it.",
            show_default=False,
        ),
    ] = None
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Run on the CPU where a provider cannot.")
    ] = False
    compare: Annotated[
        Path | None,
        typer.Option(metavar="OLD.json", help="Tell what changed since that report."),
    ] = None
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all figures and the machine there."),
    ] = None
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables there.")
    ] = None
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page with plots and tables.")
    ] = None

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm bench int8",
        "onnxlm bench int8 int4 --prompt-tokens 128,1024 --html out.html",
        "onnxlm bench int8 --batch 1,8 --threads 1,2",
        "onnxlm bench int8 --context-lengths 64,512,2048 --html out.html",
        "onnxlm bench int8 --baseline torch,torch.compile --json new.json",
        "onnxlm bench int8 --provider cpu,openvino --python openvino=ov/bin/python",
        "onnxlm bench fp16 --provider cuda --graph-capture",
        "onnxlm bench --compare old.json new.json",
    )

    def run(self) -> None:
        """Measure or read, print the tables, write the files."""
        from onnxlm.runtime.bench_report import read_report

        self._check_files()
        old = None if self.compare is None else read_report(self.compare)
        paths = self.packages or []
        if old is not None and len(paths) == 1 and paths[0].is_file():
            report = read_report(paths[0])
            self._show(report, _changes_of_files(old, report))
            return
        report = self._measure()
        # What was measured is shown and kept, whatever it is compared with.
        self._show(report, None if old is None else _changes(old, report))
        if report.interrupted:
            raise typer.Exit(INTERRUPTED)
        if not any(row.repeats for row in report.results):
            raise typer.Exit(BAD_INPUT)

    def _show(self, report: Report, changes: Table | None) -> None:
        try:
            _print(report, changes)
        finally:  # a reader that has gone away (`| head`) takes no file along
            write_files(self._texts(report, changes))

    def _measure(self) -> Report:
        from onnxlm.cli.bench_options import counts, make_cases
        from onnxlm.runtime.bench import Plan
        from onnxlm.runtime.bench_run import run_benchmark

        contexts = self.context_lengths
        cases = make_cases(
            counts("--prompt-tokens", self.prompt_tokens),
            counts("--new-tokens", self.new_tokens),
            counts("--batch", self.batch),
            () if contexts is None else counts("--context-lengths", contexts),
        )
        entries = list(self._contestants().entries())
        with progress_bars() as progress:
            return run_benchmark(entries, Plan(cases, self.repeats), progress=progress)

    def _contestants(self) -> Contestants:
        from onnxlm.cli.bench_options import (
            Contestants,
            baseline_names,
            interpreters,
            known_names,
            thread_counts,
        )
        from onnxlm.runtime.providers import find_provider, provider_names

        if not self.packages:
            raise InputError("no package to measure", fix="name the folder of one or more")
        for name in self.provider.split(","):
            find_provider(name.strip())
        providers = known_names("--provider", self.provider, provider_names())
        return Contestants(
            packages=tuple(self.packages),
            providers=providers,
            threads=thread_counts(self.threads),
            baselines=baseline_names(self.baseline),
            pythons=interpreters(self.python or [], providers),
            allow_fallback=self.allow_fallback,
            device=self.device_fields(providers),
        )

    def _check_files(self) -> None:
        """Refuse files that could not be written, before minutes are spent."""
        given = {"--json": self.json_file, "--markdown": self.markdown, "--html": self.html}
        taken: dict[Path, str] = {}
        for option, file in given.items():
            if file is None:
                continue
            check_target(file)
            other = taken.setdefault(file.resolve(), option)
            if other != option:
                raise InputError(f"{other} and {option} name the same file", found=file)

    def _texts(
        self, report: Report, changes: Table | None
    ) -> Iterator[tuple[Path, Callable[[], str]]]:
        from onnxlm.cli.bench_page import markdown, page

        if self.json_file is not None:
            yield self.json_file, report.to_json
        if self.markdown is not None:
            yield self.markdown, lambda: markdown(report, changes)
        if self.html is not None:
            yield self.html, lambda: page(report, changes)


def _changes(old: Report, new: Report) -> Table | None:
    """What changed in a run; None where there is nothing to compare, which is said."""
    from onnxlm.runtime.bench_compare import compare, compare_table, unmatched

    for line in unmatched(old, new):
        note(line)
    changes = compare(old, new)
    if not changes:
        note("nothing was compared: the run and the old report have no figures in common")
    return compare_table(changes) if changes else None


def _changes_of_files(old: Report, new: Report) -> Table | None:
    """The same of two reports, which must have something in common.

    Raises:
        InputError: They have not.
    """
    from onnxlm.runtime.bench_compare import compare, unmatched

    if not compare(old, new):
        raise InputError(
            "the reports have nothing in common",
            found="; ".join(unmatched(old, new)) or "no figures",
            fix="compare runs of the same package, provider, threads and prompt",
        )
    return _changes(old, new)


def _print(report: Report, changes: Table | None) -> None:
    from onnxlm.runtime.bench_compare import RULE
    from onnxlm.runtime.bench_tables import ratios, remarks, summary, tables

    print(summary(report))
    shown: Sequence[Table] = tables(report)
    for table in shown:
        print(f"\n{table.title}")
        print_table(table.header, table.rows, left=table.left)
    lines = [*remarks(report), *ratios(report)]
    if lines:
        print()
    for line in lines:
        print(line)
    if changes is not None:
        print(f"\n{changes.title} ({RULE})")
        print_table(changes.header, changes.rows, left=changes.left)
    for line in report.notes():
        note(line)
