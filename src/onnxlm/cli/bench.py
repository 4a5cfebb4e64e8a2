"""`onnxlm bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from onnxlm.cli.faults import BAD_INPUT, INTERRUPTED
from onnxlm.cli.inspect import parse_counts
from onnxlm.cli.terminal import note, print_table, progress_bars
from onnxlm.errors import InputError

if TYPE_CHECKING:
    from onnxlm.package import Package
    from onnxlm.runtime.bench_report import Report
    from onnxlm.runtime.bench_run import Entry

BASELINES = ("torch",)


@dataclass(frozen=True)
class Bench:
    """Measure speed, memory and load time of packages, side by side.

    Each package runs on each provider with each prompt length. All are interleaved in rounds, so that a
    machine that gets slower or busier hits all alike; numbers are medians over the rounds with the lowest and
    highest in brackets. A round before them is not counted. Prompts are English text in the package's own
    tokens; generation is greedy and goes on past end-of-text tokens. Load time and memory are measured before
    the rounds, each package in a process of its own. KL and top-1 are those that the package's manifest
    holds. Ctrl-C ends the run and prints what is done.
    """

    packages: Annotated[
        list[Path],
        typer.Argument(metavar="PACKAGE", help="Folders of packages.", show_default=False),
    ]
    provider: Annotated[
        str, typer.Option(metavar="NAME,...", help="Execution providers, see `onnxlm providers`.")
    ] = "cpu"
    prompt_tokens: Annotated[str, typer.Option(metavar="N,...", help="Lengths of prompts.")] = "128"
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate in each run.")] = 128
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is all cores.")] = 0
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="torch", help="Also run the eager PyTorch model (fp32) of the packages' source."
        ),
    ] = None
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Run on the CPU where a provider cannot.")
    ] = False
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all figures and the machine there."),
    ] = None

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm bench smollm2-int8",
        "onnxlm bench smollm2-int8 smollm2-int4 --prompt-tokens 128,1024",
        "onnxlm bench smollm2-int8 --provider cpu,cuda --json bench.json",
        "onnxlm bench smollm2-int8 --baseline torch --threads 2",
    )

    def run(self) -> None:
        """Measure, print the table, write the file."""
        from onnxlm.runtime.bench import Plan
        from onnxlm.runtime.bench_run import run_benchmark
        from onnxlm.runtime.session import usable_cores

        lengths = tuple(dict.fromkeys(parse_counts("--prompt-tokens", self.prompt_tokens)))
        entries = list(self._entries(lengths))
        threads = self.threads or usable_cores()
        plan = Plan(lengths, self.new_tokens, self.repeats)
        with progress_bars() as progress:
            report = run_benchmark(entries, plan, threads, progress=progress)
        if self.json_file is not None:
            self.json_file.write_text(report.to_json(), encoding="utf-8")
        _print(report)
        if report.interrupted:
            raise typer.Exit(INTERRUPTED)
        if all(row.speed is None for row in report.rows):
            raise typer.Exit(BAD_INPUT)

    def _entries(self, lengths: Sequence[int]) -> Iterator[Entry]:
        """Every package on every provider, then the baselines.

        Raises:
            InputError: The baseline is not known, or the JSON file's folder does not exist.
            PackageError: A package is damaged.
            ProviderError: A provider is not known.
        """
        from onnxlm.package import open_package

        if self.baseline is not None and self.baseline not in BASELINES:
            raise InputError("--baseline", found=repr(self.baseline), allowed=", ".join(BASELINES))
        if self.json_file is not None and not self.json_file.absolute().parent.is_dir():
            raise InputError(f"{self.json_file}: there is no such folder", fix="make it first")
        packages = [open_package(path) for path in self.packages]
        names = _short_names([package.path for package in packages])
        providers = list(dict.fromkeys(name.strip() for name in self.provider.split(",")))
        for package, name in zip(packages, names, strict=True):
            for provider in providers:
                yield self._package_entry(package, name, provider, lengths)
        if self.baseline is not None:
            sources = {str(package.manifest.source.get("path")): package for package in packages}
            for source, package in sources.items():
                yield self._eager_entry(source, package, lengths)

    def _package_entry(
        self, package: Package, name: str, provider: str, lengths: Sequence[int]
    ) -> Entry:
        from onnxlm.runtime.bench_package import PackageContestant, file_bytes, worst_quality
        from onnxlm.runtime.bench_report import Label
        from onnxlm.runtime.bench_run import Entry
        from onnxlm.runtime.providers import find_provider

        manifest = package.manifest
        found = find_provider(provider)
        return Entry(
            label=Label(
                model=name,
                provider=provider,
                ort_name=found.ort_name,
                precision=manifest.precision,
                file_bytes=file_bytes(manifest),
                quality=worst_quality(manifest),
            ),
            contestant=PackageContestant(
                package.path.absolute(), provider, self.threads, self.allow_fallback
            ),
            prompts=_prompts(package, lengths),
            context_length=manifest.context_length,
            failure=None if self.allow_fallback else found.unavailable(),
        )

    def _eager_entry(self, source: str, package: Package, lengths: Sequence[int]) -> Entry:
        from onnxlm.cli.eager_baseline import EagerContestant
        from onnxlm.runtime.bench_report import Label
        from onnxlm.runtime.bench_run import Entry

        gone = f"the package's source is not there any more: {source}"
        return Entry(
            label=Label(f"eager {Path(source).name}", "torch", None, "fp32", baseline=True),
            contestant=EagerContestant(source, self.threads),
            prompts=_prompts(package, lengths),
            context_length=package.manifest.context_length,
            failure=None if Path(source).exists() else gone,
        )


def _prompts(package: Package, lengths: Sequence[int]) -> dict[int, list[int]]:
    from onnxlm.runtime.bench_package import prompt_ids

    vocab_size = package.manifest.vocab_size
    return {length: prompt_ids(package.path, vocab_size, length) for length in lengths}


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The folders' names; whole paths where two would read the same."""
    names = [path.absolute().name for path in paths]
    if len(set(names)) == len(names):
        return names
    return [str(path) for path in paths]


def _print(report: Report) -> None:
    from onnxlm.runtime.bench_report import HEADER, LEFT

    machine = report.machine
    plan = report.plan
    print(
        f"{machine.cpu}, {report.threads} threads; {plan.new_tokens} new tokens, "
        f"{plan.repeats} rounds: median (lowest-highest)"
    )
    print_table(HEADER, [row.cells() for row in report.rows], left=LEFT)
    for line in (*report.remarks(), *report.ratios()):
        print(line)
    for line in report.notes():
        note(line)
