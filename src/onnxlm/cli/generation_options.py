"""Options of every command that generates: how tokens are chosen, and what runs the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxlm.cli.sampling_options import (
    BeamOptions,
    DrawOptions,
    EndOptions,
    PenaltyOptions,
    read_fields,
)

if TYPE_CHECKING:
    from onnxlm.runtime import Generation, LanguageModel


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(BeamOptions, EndOptions, PenaltyOptions, DrawOptions):
    """Fields of `SamplingParams`, by the same names. What is not given is as the package recommends."""

    def sampling_fields(self) -> dict[str, Any]:
        """What `LanguageModel.generate` takes."""
        return read_fields(self, (DrawOptions, PenaltyOptions, EndOptions, BeamOptions))


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Where a package runs."""

    provider: Annotated[str, typer.Option(help="Execution provider, see `onnxlm providers`.")] = (
        "cpu"
    )
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is all cores.")] = 0
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Run on the CPU where the provider cannot.")
    ] = False

    kv_budget: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Most memory of keys and values, as 512MB."),
    ] = None
    full_cache: Annotated[
        bool,
        typer.Option(
            "--full-cache", help="Keep keys and values that no sliding window sees any more."
        ),
    ] = False
    device_id: Annotated[int, typer.Option(help="Number of the provider's device.")] = 0
    gpu_mem_limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Most memory of the device for weights and work, as 4GB."
        ),
    ] = None
    graph_capture: Annotated[
        bool,
        typer.Option("--graph-capture", help="Record a decode step once and replay it (CUDA)."),
    ] = False

    def load(self, package: Path) -> LanguageModel:
        """Open a package there."""
        from onnxlm.runtime import load
        from onnxlm.runtime.memory_budget import read_bytes

        return load(
            package,
            provider=self.provider,
            threads=self.threads,
            allow_fallback=self.allow_fallback,
            kv_budget=self.kv_budget,
            full_cache=self.full_cache,
            device_id=self.device_id,
            gpu_mem_limit=read_bytes(self.gpu_mem_limit, "gpu_mem_limit") or 0,
            graph_capture=self.graph_capture,
        )


def speed_line(result: Generation, provider: str) -> str:
    """One line on a generation that has ended."""
    return (
        f"{provider}: TTFT {result.ttft_s * 1e3:.0f} ms for {result.prompt_tokens} prompt tokens, "
        f"{result.decode_tokens_per_s:.1f} tok/s, {len(result.token_ids)} new tokens "
        f"(ended by {result.finish_reason})"
    )
