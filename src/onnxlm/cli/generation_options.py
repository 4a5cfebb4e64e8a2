"""Options of every command that generates: how tokens are chosen, and what runs the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxlm.cli.device_options import DeviceOptions
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
class _ProviderOptions:
    """Where a package runs."""

    provider: Annotated[str, typer.Option(help="Execution provider, see `onnxlm providers`.")] = (
        "cpu"
    )
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is all cores.")] = 0
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Run on the CPU where the provider cannot.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class SessionOptions(DeviceOptions, _ProviderOptions):
    """Where and how a package runs."""

    full_cache: Annotated[
        bool,
        typer.Option(
            "--full-cache", help="Keep keys and values that no sliding window sees any more."
        ),
    ] = False

    def load(self, package: Path) -> LanguageModel:
        """Open a package there."""
        from onnxlm.runtime import load

        return load(
            package,
            provider=self.provider,
            threads=self.threads,
            allow_fallback=self.allow_fallback,
            kv_budget=self.kv_budget,
            full_cache=self.full_cache,
            device_id=self.device_id,
            gpu_mem_limit=self.memory_limit,
            graph_capture=self.graph_capture,
        )


def speed_line(result: Generation, provider: str) -> str:
    """One line on a generation that has ended."""
    return (
        f"{provider}: TTFT {result.ttft_s * 1e3:.0f} ms for {result.prompt_tokens} prompt tokens, "
        f"{result.decode_tokens_per_s:.1f} tok/s, {len(result.token_ids)} new tokens "
        f"(ended by {result.finish_reason})"
    )
