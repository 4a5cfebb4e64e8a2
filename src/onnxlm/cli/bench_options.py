"""What the options of `onnxlm bench` mean: lists of numbers, cases, contestants."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxlm.cli.device_options import accepted
from onnxlm.cli.inspect import parse_counts
from onnxlm.errors import InputError

if TYPE_CHECKING:
    from onnxlm.package import Package
    from onnxlm.runtime.bench import Case
    from onnxlm.runtime.bench_run import Entry

# Name -> whether the model goes through torch.compile.
BASELINES = {"torch": False, "torch.compile": True}
# Decode steps at each context length of a curve.
CURVE_STEPS = 16


@dataclass(frozen=True)
class Contestants:
    """Who takes part: each package on each provider with each number of threads, then the baselines.

    Attributes:
        packages: Folders.
        providers: Execution providers.
        threads: Numbers of threads.
        baselines: Names from `BASELINES`.
        pythons: Interpreters of providers that live in another wheel.
        allow_fallback: Run on the CPU where a provider cannot.
        device: More options of the sessions, by the names of `onnxlm.runtime.load`.
    """

    packages: tuple[Path, ...]
    providers: tuple[str, ...]
    threads: tuple[int, ...]
    baselines: tuple[str, ...]
    pythons: Mapping[str, str]
    allow_fallback: bool
    device: Mapping[str, Any] = field(default_factory=dict)

    def entries(self) -> Iterator[Entry]:
        """Every contestant, in the order in which they take turns.

        Raises:
            PackageError: A package is damaged.
            ProviderError: A provider is not known.
        """
        from onnxlm.package import open_package

        packages = [open_package(path) for path in self.packages]
        names = _short_names([package.path for package in packages])
        for package, name in zip(packages, names, strict=True):
            for provider, threads in product(self.providers, self.threads):
                yield self._package_entry(package, name, provider, threads)
        sources = {_source(package): package for package in packages}
        for baseline, source in product(self.baselines, sources):
            for threads in self.threads:
                name = f" {Path(source).name}" if len(sources) > 1 else " PyTorch"
                yield _baseline_entry(baseline, (source, name), sources[source], threads)

    def _package_entry(self, package: Package, name: str, provider: str, threads: int) -> Entry:
        import sys

        from onnxlm.runtime.bench_child import Spec
        from onnxlm.runtime.bench_package import (
            cache_refusal,
            file_bytes,
            package_work,
            worst_quality,
        )
        from onnxlm.runtime.bench_report import Label
        from onnxlm.runtime.bench_run import Entry
        from onnxlm.runtime.providers import find_provider

        manifest = package.manifest
        found = find_provider(provider)
        # Another interpreter knows best what it has: its process says so when it loads.
        ask_here = not self.allow_fallback and provider not in self.pythons
        options = accepted(found, self.device)
        return Entry(
            label=Label(
                model=name,
                provider=provider,
                ort_name=found.ort_name,
                precision=manifest.precision,
                threads=threads,
                file_bytes=file_bytes(manifest),
                quality=worst_quality(manifest),
                source=_source(package),
                options=options or None,
            ),
            spec=Spec(
                "onnxlm.runtime.bench_package:PackageContestant",
                {
                    "path": str(package.path.absolute()),
                    "provider": provider,
                    "threads": threads,
                    "allow_fallback": self.allow_fallback,
                    "options": options,
                },
                python=self.pythons.get(provider, sys.executable),
            ),
            rows=_rows(package),
            context_length=manifest.context_length,
            work=package_work(package),
            refuse=cache_refusal(manifest.states, found.device),
            failure=found.unavailable() if ask_here else None,
        )


def _baseline_entry(name: str, origin: tuple[str, str], package: Package, threads: int) -> Entry:
    """A baseline by its name, of a source and what that is called."""
    from onnxlm.runtime.bench_child import Spec
    from onnxlm.runtime.bench_report import Label
    from onnxlm.runtime.bench_run import Entry

    source, called = origin
    gone = f"the package's source is not found from here: {source}"
    words = "compiled" if BASELINES[name] else "eager"
    return Entry(
        label=Label(f"{words}{called}", name, None, "fp32", threads, baseline=True, source=source),
        spec=Spec(
            "onnxlm.cli.eager_baseline:EagerContestant",
            {"source": source, "threads": threads, "compiled": BASELINES[name]},
            imports=("torch", "onnxlm.models"),
        ),
        rows=_rows(package),
        context_length=package.manifest.context_length,
        failure=None if Path(source).exists() else gone,
    )


def _source(package: Package) -> str:
    """What a package was made from, as its manifest has it."""
    return str(package.manifest.source.get("path"))


def _rows(package: Package) -> functools.partial[list[list[int]]]:
    from onnxlm.runtime.bench_package import prompt_rows

    return functools.partial(prompt_rows, package.path, package.manifest.vocab_size)


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The folders' names; whole paths where two would read the same."""
    names = [path.absolute().name for path in paths]
    if len(set(names)) == len(names):
        return names
    return [str(path) for path in paths]


def make_cases(
    prompts: Sequence[int], news: Sequence[int], batches: Sequence[int], contexts: Sequence[int]
) -> tuple[Case, ...]:
    """Every combination, and a curve for each batch if there are context lengths.

    Raises:
        InputError: Context lengths lie closer together than the steps that are taken at each.
    """
    from onnxlm.runtime.bench import Case

    cases = [Case(*numbers) for numbers in product(prompts, news, batches)]
    lengths = tuple(sorted(set(contexts)))
    for shorter, longer in pairwise(lengths):
        if longer - shorter <= CURVE_STEPS:
            raise InputError(
                "--context-lengths",
                found=f"{shorter} and {longer}",
                allowed=f"numbers more than {CURVE_STEPS} apart, the steps taken at each",
            )
    if lengths:
        cases += [Case(lengths[0], CURVE_STEPS, batch, lengths) for batch in batches]
    return tuple(cases)


def counts(option: str, text: str) -> tuple[int, ...]:
    """Numbers of an option such as "128,1024", each once.

    Raises:
        InputError: Something in it is no whole number above 0.
    """
    return tuple(dict.fromkeys(parse_counts(option, text)))


def thread_counts(text: str) -> tuple[int, ...]:
    """Numbers of threads, each once; 0 is all cores.

    Raises:
        InputError: Something in it is no whole number.
    """
    from onnxlm.runtime.cores import usable_cores

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        allowed = "whole numbers from 0 (all cores), as 1,2"
        raise InputError("--threads", found=repr(text), allowed=allowed)
    return tuple(dict.fromkeys(int(part) or usable_cores() for part in parts))


def known_names(option: str, text: str | None, allowed: Sequence[str]) -> tuple[str, ...]:
    """Names of an option such as "torch,torch.compile", each once; none of None.

    Raises:
        InputError: One of them is not allowed.
    """
    names = [] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in allowed:
            raise InputError(option, found=repr(name), allowed=", ".join(allowed))
    return tuple(dict.fromkeys(names))


def baseline_names(text: str | None) -> tuple[str, ...]:
    """Baselines, whose library must be there.

    Raises:
        InputError: One is not known, or PyTorch is not installed.
    """
    names = known_names("--baseline", text, tuple(BASELINES))
    if names and importlib.util.find_spec("torch") is None:
        raise InputError(
            f"--baseline {names[0]} needs the library 'torch', which is not installed",
            fix="pip install 'onnxlm[export]'",
        )
    return names


def interpreters(texts: Sequence[str], providers: Sequence[str]) -> dict[str, str]:
    """Provider -> interpreter, of texts such as "openvino=.venvs/ov/bin/python".

    Raises:
        InputError: A text has another form, its provider is not measured, or there is no such program.
    """
    found = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not (separator and name and path):
            raise InputError(
                "--python",
                found=repr(text),
                allowed="PROVIDER=PATH, as openvino=.venvs/ov/bin/python",
            )
        if name not in providers:
            raise InputError(
                f"--python {text}",
                found=repr(name),
                allowed=f"a provider of --provider: {', '.join(providers)}",
            )
        program = shutil.which(path)
        if program is None:
            raise InputError(f"--python {text}: there is no such program", found=path)
        # Not resolved: an environment's interpreter is a link, and is found by where the link lies.
        found[name] = str(Path(program).absolute())
    return found
