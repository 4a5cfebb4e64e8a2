"""`onnxlm providers`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from onnxlm.cli.device_options import DeviceChoice
from onnxlm.cli.terminal import note, print_json, print_table


@dataclass(frozen=True)
class _Row:
    name: str
    onnxruntime_name: str
    available: bool
    reason: str | None
    install: str
    precisions: tuple[str, ...]
    lowerings: tuple[str, ...]


@dataclass(frozen=True)
class Providers(DeviceChoice):
    """List the execution providers: which work here, what they run, and why the others do not.

    With a package: which provider runs which of its nodes, and how often a call copies between devices.
    """

    package: Annotated[
        Path | None, typer.Option(metavar="PACKAGE", help="Show where this package's nodes run.")
    ] = None
    provider: Annotated[str, typer.Option(help="The provider to run the package on.")] = "cpu"
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Run on the CPU what the provider cannot.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm providers",
        "onnxlm providers --package smollm2-plain --provider openvino",
    )

    def run(self) -> None:
        """Ask every provider, or one of a package."""
        if self.package is not None:
            self._show_placement(self.package)
            return
        rows = _rows()
        if self.as_json:
            print_json([asdict(row) for row in rows])
            return
        cells = [
            (
                row.name,
                "yes" if row.available else "no",
                ", ".join(row.precisions),
                _lowerings(row),
                row.reason or "",
            )
            for row in rows
        ]
        header = ("provider", "available", "precisions", "lowerings", "why not")
        print_table(header, cells, left=len(header))
        for row in rows:
            if not row.available:
                note(f"to get {row.name}: {row.install}")

    def _show_placement(self, folder: Path) -> None:
        from onnxlm.package import open_package
        from onnxlm.runtime.placement import package_placement
        from onnxlm.runtime.session import SessionConfig

        config = SessionConfig(
            provider=self.provider,
            device_id=self.device_id,
            allow_fallback=self.allow_fallback,
            gpu_mem_limit=self.memory_limit,
        )
        found = package_placement(open_package(folder), config)
        if self.as_json:
            print_json({name: asdict(placement) for name, placement in found.items()})
            return
        cells = [
            (graph, provider, operator, str(count))
            for graph, placement in found.items()
            for provider, operators in placement.counts.items()
            for operator, count in operators.items()
        ]
        print_table(("graph", "provider", "operator", "nodes"), cells, left=3)
        for graph, placement in found.items():
            print(f"{graph}: {placement.summary()}")


def _lowerings(row: _Row) -> str:
    """Those that go with one type of activations say so."""
    from onnxlm.runtime.providers import find_provider

    types = find_provider(row.name).activations
    return ", ".join(
        f"{name} ({' or '.join(types[name])} only)" if name in types else name
        for name in row.lowerings
    )


def _rows() -> list[_Row]:
    from onnxlm.runtime.providers import find_provider, provider_names

    rows = []
    for name in provider_names():
        found = find_provider(name)
        reason = found.unavailable()
        rows.append(
            _Row(
                name=name,
                onnxruntime_name=found.ort_name,
                available=reason is None,
                reason=reason,
                install=found.install,
                precisions=found.precisions,
                lowerings=found.lowerings,
            )
        )
    return rows
