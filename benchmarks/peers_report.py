"""Rows of the comparison: as a table, as ratios, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quality import Quality

from onnxlm.cli.terminal import print_table
from onnxlm.runtime.bench_figures import Speed, Spread
from onnxlm.runtime.machine import describe_machine
from onnxlm.runtime.memory import Memory

SCHEMA = "onnxlm.peers/1"
HEADER = (
    "contestant",
    "prompt",
    "KL",
    "top-1",
    "ppl",
    "prefill tok/s",
    "decode tok/s",
    "p95 ms",
    "file MB",
    "PSS MB",
    "load s",
)


@dataclass(frozen=True)
class Row:
    """One contestant at one prompt length.

    Attributes:
        quality: By "prefill" and "decode": figures of prompts and of single steps.
        prompt_tokens: None when only quality was measured.
        foreign_load: Cores that other processes used meanwhile, median over its runs.
    """

    name: str
    version: str
    bytes: int
    load_s: float
    memory: Memory
    quality: Mapping[str, Quality]
    prompt_tokens: int | None
    speed: Speed | None
    failure: str | None = None
    rounds: int = 0
    foreign_load: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def print_rows(rows: Sequence[Row]) -> None:
    """The table, prompts of one length together."""
    ordered = sorted(rows, key=lambda row: row.prompt_tokens or 0)
    print_table(HEADER, [_cells(row) for row in ordered], left=1)


def _cells(row: Row) -> list[str]:
    quality = row.quality.get("prefill")
    cells = [row.name, str(row.prompt_tokens or "-")]
    if quality is None:
        cells += ["-", "-", "-"]
    else:
        cells += [f"{quality.kl:.4f}", f"{quality.top1:.3f}", f"{quality.perplexity_change:+.1%}"]
    if row.speed is None:
        cells += [row.failure or "-", "-", "-"]
    else:
        cells += [_spread(row.speed.prefill_tokens_per_s), _spread(row.speed.decode_tokens_per_s)]
        p95 = row.speed.decode_p95_ms
        cells.append("-" if p95 is None else f"{p95:.1f}")
    pss = row.memory.pss_bytes
    cells += [f"{row.bytes / 1e6:.0f}", "-" if pss is None else f"{pss / 1e6:.0f}"]
    return [*cells, f"{row.load_s:.2f}"]


def _spread(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{value.median:.0f} ({value.low:.0f}-{value.high:.0f})"


def print_ratios(rows: Sequence[Row], pairs: Sequence[Sequence[str]]) -> None:
    """Ours by the peer's, at each prompt length."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    for ours, peer in pairs:
        for mine in by_name.get(ours, []):
            for theirs in by_name.get(peer, []):
                if mine.prompt_tokens == theirs.prompt_tokens and mine.speed and theirs.speed:
                    print(f"{ours} / {peer} at {mine.prompt_tokens}: {_ratios(mine, theirs)}")


def _ratios(mine: Row, theirs: Row) -> str:
    assert mine.speed is not None
    assert theirs.speed is not None
    prefill = mine.speed.prefill_tokens_per_s.median / theirs.speed.prefill_tokens_per_s.median
    parts = [f"prefill {prefill:.2f}x"]
    ours, others = mine.speed.decode_tokens_per_s, theirs.speed.decode_tokens_per_s
    if ours is not None and others is not None:
        parts.append(f"decode {ours.median / others.median:.2f}x")
    if "prefill" in mine.quality and "prefill" in theirs.quality:
        parts.append(f"KL {mine.quality['prefill'].kl:.4f} to {theirs.quality['prefill'].kl:.4f}")
    return ", ".join(parts)


def save(file: Path, rows: Sequence[Row], options: Mapping[str, Any]) -> None:
    """Everything as JSON, with the machine."""
    value = {
        "schema": SCHEMA,
        "machine": dataclasses.asdict(describe_machine()),
        "options": {k: v for k, v in options.items() if k not in ("json", "python", "source")},
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def read_quality(file: Path) -> dict[str, dict[str, Quality]]:
    """Quality by contestant from a saved result."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {
        row["name"]: {by: Quality(**figures) for by, figures in row["quality"].items()}
        for row in rows
    }
