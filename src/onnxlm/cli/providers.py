"""`onnxlm providers`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

import typer

from onnxlm.cli.terminal import note, print_json, print_table


@dataclass(frozen=True)
class _Row:
    name: str
    onnxruntime_name: str
    available: bool
    reason: str | None
    install: str


@dataclass(frozen=True)
class Providers:
    """List the execution providers: which work here, and why the others do not."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False

    examples: ClassVar[tuple[str, ...]] = ("onnxlm providers",)

    def run(self) -> None:
        """Ask every provider."""
        from onnxlm.runtime.providers import find_provider, provider_names

        rows = []
        for name in provider_names():
            provider = find_provider(name)
            reason = provider.unavailable()
            rows.append(_Row(name, provider.ort_name, reason is None, reason, provider.install))
        if self.as_json:
            print_json([asdict(row) for row in rows])
            return
        cells = [(row.name, "yes" if row.available else "no", row.reason or "") for row in rows]
        print_table(("provider", "available", "why not"), cells, left=3)
        for row in rows:
            if not row.available:
                note(f"to get {row.name}: {row.install}")
