"""`onnxlm inspect`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from onnxlm.cli.summary import package_facts, pairs
from onnxlm.cli.terminal import memory, note, print_json, print_table, size
from onnxlm.errors import InputError

if TYPE_CHECKING:
    from onnxlm.components import Component
    from onnxlm.inspection import Inspection, KvCache
    from onnxlm.package import Package


@dataclass(frozen=True)
class Inspect:
    """Show what a model is made of: parameters and bytes per component, and what its cache takes.

    SOURCE is a package, a Hugging Face folder, a GGUF file, a Hub id, a config.json without weights, or the
    name of a model whose sizes are known, as gpt3-175b; a name that is not known lists those that are.
    """

    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Package, model, config.json or preset.", show_default=False
        ),
    ]
    kv_lengths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Lengths at which the cache is measured."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm inspect smollm2-int8",
        "onnxlm inspect SmolLM2-135M-Instruct.Q4_1.gguf --kv-lengths 1,2048,8192",
        "onnxlm inspect gpt3-175b",
    )

    def run(self) -> None:
        """Inspect, then print tables or JSON."""
        from onnxlm.inspection import inspect

        lengths = None if self.kv_lengths is None else parse_counts("--kv-lengths", self.kv_lengths)
        found = inspect(self.source, lengths)
        if self.as_json:
            print_json(_facts(found))
        else:
            _print(found)


def parse_counts(option: str, text: str) -> list[int]:
    """Numbers of an option such as "128,1024".

    Raises:
        InputError: Something in it is no whole number above 0.
    """
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise InputError(option, found=repr(text), allowed="whole numbers from 1, as 128,1024")
        counts.append(int(part))
    return counts


def _print(found: Inspection) -> None:
    context = "" if found.context_length is None else f", context {found.context_length}"
    print(f"{found.source}: {found.model_type} ({found.kind}){context}")
    if found.components:
        print()
        _print_components(found.components)
    if found.active_parameters is not None:
        print(f"of these a token uses {found.active_parameters:,}")
    if found.kv_cache is not None:
        print()
        _print_cache(found.kv_cache)
    if found.package is not None:
        print()
        _print_package(found.package)
    for text in found.notes:
        note(f"note: {text}")


def _print_components(components: tuple[Component, ...]) -> None:
    counts = [part.parameters for part in components if part.parameters is not None]
    biases = sum(part.biases or 0 for part in components)
    total = sum(counts)
    rows = [
        (
            part.name,
            f"tied to {part.tied_to}" if part.tied_to else "",
            _number(part.parameters),
            f"{part.parameters / total:.3%}" if part.parameters and total else "",
            _number(part.biases),
            size(part.bytes),
        )
        for part in components
    ]
    stored = size(sum(part.bytes for part in components))
    rows.append(("total", "", f"{total:,}" if counts else "-", "", f"{biases:,}", stored))
    if biases:
        rows.append(("without biases", "", f"{total - biases:,}", "", "", ""))
    shown = [0, 1, 2, 3, *([4] if biases else []), 5]
    header = ("component", "", "parameters", "share", "of them biases", "bytes")
    print_table(_columns(header, shown), [_columns(row, shown) for row in rows], left=2)


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _columns(row: tuple[str, ...], shown: list[int]) -> tuple[str, ...]:
    return tuple(row[i] for i in shown)


def _print_cache(cache: KvCache) -> None:
    print(
        f"KV cache: {cache.attention}, {cache.layers} layers x {cache.kv_heads} key-value heads "
        f"x {cache.head_dim} ({cache.query_heads} query heads), {cache.dtype}, "
        f"{cache.bytes_per_token:,} bytes ({memory(cache.bytes_per_token)}) a token"
    )
    if cache.window_layers:
        print(
            f"  {cache.window_layers} of these layers have a sliding window and keep "
            f"{cache.window_tokens:,} tokens at most"
        )
    rows = [(f"{length:,}", f"{n:,}", memory(n)) for length, n in cache.bytes_at.items()]
    print_table(("tokens", "bytes", "memory"), rows, left=0)


def _print_package(package: Package) -> None:
    manifest = package.manifest
    print(f"precision {manifest.precision}, lowering {manifest.lowering}")
    if manifest.quantization is not None:
        summary = pairs(manifest.quantization.summary)
        print(f"quantization {manifest.quantization.scheme}: {summary}")
    for name, graph in manifest.graphs.items():
        print(f"graph {name}: {graph.file}, {pairs(graph.fusions)}")
    for title, figures in (("quality", manifest.quality), ("parity", manifest.parity)):
        if figures:
            print(f"{title}: {pairs(figures)}")
    producer = manifest.producer
    print(f"made by {producer.name} {producer.version} with {pairs(producer.libraries)}")
    print(f"from {pairs(manifest.source)}")
    print()
    files = sorted(manifest.files.items(), key=lambda item: -item[1].bytes)
    print_table(("file", "bytes"), [(name, f"{spec.bytes:,}") for name, spec in files])


def _facts(found: Inspection) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "source": found.source,
        "kind": found.kind,
        "model_type": found.model_type,
        "context_length": found.context_length,
        "components": {part.name: _without_name(part) for part in found.components},
        "active_parameters": found.active_parameters,
        "kv_cache": None if found.kv_cache is None else asdict(found.kv_cache),
        "notes": list(found.notes),
    }
    if found.package is not None:
        manifest = found.package.manifest
        facts["package"] = {
            **package_facts(found.package),
            "producer": asdict(manifest.producer),
            "source": dict(manifest.source),
        }
    return facts


def _without_name(part: Component) -> dict[str, Any]:
    return {key: value for key, value in asdict(part).items() if key != "name"}
