"""Rows of the comparison: as a table, as ratios, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from onnxlm.cli.terminal import print_table
from onnxlm.quality import Quality
from onnxlm.runtime.bench import Sample
from onnxlm.runtime.bench_figures import Speed, Spread, speed
from onnxlm.runtime.machine import describe_machine
from onnxlm.runtime.memory import Memory

SCHEMA = "onnxlm.peers/1"
# The contestant that only reads memory.
MEMORY = "memory read"
HEADER = (
    "contestant",
    "prompt",
    "KL",
    "KL steps",
    "top-1",
    "ppl",
    "prefill tok/s",
    "decode tok/s",
    "p95 ms",
    "of read rate",
    "file MB",
    "PSS MB",
    "load s",
)


@dataclass(frozen=True)
class Row:
    """One contestant at one prompt length.

    Attributes:
        bytes: Of its files.
        bytes_per_step: Weights that a decode step reads.
        foreign_load: Cores that other processes used meanwhile, median over its runs.
        prompt_tokens: None when only quality was measured.
        quality: By "prefill" and "decode": figures of prompts and of single steps.
        samples: One a round.
    """

    name: str
    version: str
    bytes: int
    bytes_per_step: int
    load_s: float
    memory: Memory
    foreign_load: float | None = None
    prompt_tokens: int | None = None
    failure: str | None = None
    samples: tuple[Sample, ...] = ()
    quality: Mapping[str, Quality] = field(default_factory=dict)

    @classmethod
    def absent(cls, name: str, reason: str) -> Row:
        """A contestant that was not run."""
        return cls(name, "", 0, 0, 0.0, Memory(None, None), failure=reason)

    @property
    def speed(self) -> Speed | None:
        """Figures over all rounds; None when there was none."""
        return speed(self.samples, self.prompt_tokens or 0) if self.samples else None

    def to_dict(self) -> dict[str, Any]:
        """JSON fields; instead of the samples each round's own figures."""
        value = dataclasses.asdict(self)
        del value["samples"]
        figures = None if self.speed is None else dataclasses.asdict(self.speed)
        rounds = [
            {"prefill_tokens_per_s": _prefill(self, i), "decode_tokens_per_s": _decode(self, i)}
            for i in range(len(self.samples))
        ]
        return {**value, "speed": figures, "rounds": rounds}


def _prefill(row: Row, number: int) -> float:
    """Tokens a second of one round."""
    return (row.prompt_tokens or 0) / row.samples[number].prefill_s


def _decode(row: Row, number: int) -> float | None:
    """One by the median step of one round."""
    steps = row.samples[number].step_s
    return 1 / median(steps) if steps else None


def print_rows(rows: Sequence[Row]) -> None:
    """The table, prompts of one length together, and below it what was not run."""
    ordered = sorted(rows, key=lambda row: row.prompt_tokens or 0)
    rates = {row.prompt_tokens: _read_rate(row) for row in rows if row.name == MEMORY}
    models = [row for row in ordered if row.name != MEMORY]
    print_table(HEADER, [_cells(row, rates.get(row.prompt_tokens)) for row in models], left=1)
    for length, rate in rates.items():
        if rate is not None:
            print(f"memory is read at {rate / 1e9:.1f} GB/s (prompt {length})")
    for row in models:
        if row.failure is not None:
            print(f"{_until(row)}: {row.name}: {row.failure}")


def _until(row: Row) -> str:
    return f"stopped after {len(row.samples)} rounds" if row.samples else "not run"


def _read_rate(row: Row) -> float | None:
    """Bytes a second of the contestant that only reads."""
    if row.speed is None or row.speed.decode_tokens_per_s is None:
        return None
    return row.bytes_per_step * row.speed.decode_tokens_per_s.median


def _cells(row: Row, read_rate: float | None) -> list[str]:
    cells = [row.name, str(row.prompt_tokens or "-")]
    quality, steps = row.quality.get("prefill"), row.quality.get("decode")
    cells.append("-" if quality is None else f"{quality.kl:.4f}")
    cells.append("-" if steps is None else f"{steps.kl:.4f}")
    cells.append("-" if quality is None else f"{quality.top1:.3f}")
    cells.append("-" if quality is None else f"{quality.perplexity_change:+.1%}")
    decode = None if row.speed is None else row.speed.decode_tokens_per_s
    p95 = None if row.speed is None else row.speed.decode_p95_ms
    cells.append("-" if row.speed is None else _spread(row.speed.prefill_tokens_per_s))
    cells += [_spread(decode), "-" if p95 is None else f"{p95:.1f}"]
    if decode is None or read_rate is None:
        cells.append("-")
    else:
        cells.append(f"{decode.median * row.bytes_per_step / read_rate:.0%}")
    pss = row.memory.pss_bytes
    cells.append(f"{row.bytes / 1e6:.0f}" if row.bytes else "-")
    cells.append("-" if pss is None else f"{pss / 1e6:.0f}")
    return [*cells, f"{row.load_s:.2f}" if row.load_s else "-"]


def _spread(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{value.median:.0f} ({value.low:.0f}-{value.high:.0f})"


def print_ratios(rows: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> None:
    """How much faster ours is than the peer, at each prompt length."""
    for ours, peer in pairs:
        for mine in rows:
            for theirs in rows:
                if (mine.name, theirs.name) != (ours, peer):
                    continue
                if mine.prompt_tokens == theirs.prompt_tokens and mine.samples and theirs.samples:
                    words = ", ".join(_ratios(mine, theirs))
                    print(f"{ours} / {peer} at {mine.prompt_tokens}: {words}")


def _ratios(mine: Row, theirs: Row) -> list[str]:
    """Medians, with their spread, of the ratios of each round: both ran under nearly the same load."""
    parts = []
    for word, figure in (("prefill", _prefill), ("decode", _decode)):
        pairs = [
            (figure(mine, i), figure(theirs, i))
            for i in range(min(len(mine.samples), len(theirs.samples)))
        ]
        found = [ours / others for ours, others in pairs if ours and others]
        if found:
            spread = Spread.of(found)
            parts.append(f"{word} {spread.median:.2f}x ({spread.low:.2f}-{spread.high:.2f})")
    if "prefill" in mine.quality and "prefill" in theirs.quality:
        parts.append(f"KL {mine.quality['prefill'].kl:.4f} to {theirs.quality['prefill'].kl:.4f}")
    return parts


def save(file: Path, rows: Sequence[Row], options: Mapping[str, Any]) -> None:
    """Everything as JSON, with the machine; paths are left out, they are the user's own."""
    kept = ("threads", "prompt_tokens", "new_tokens", "rounds", "quality_tokens")
    value = {
        "schema": SCHEMA,
        "machine": dataclasses.asdict(describe_machine()),
        "options": {key: options[key] for key in kept},
        "rows": [row.to_dict() for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_quality(file: Path) -> dict[str, dict[str, Quality]]:
    """Quality by contestant from a saved result."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {
        row["name"]: {way: Quality(**figures) for way, figures in row["quality"].items()}
        for row in rows
    }
