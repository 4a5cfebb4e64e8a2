"""Results of a benchmark: rows with everything known of a contestant, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxlm.runtime.bench import Plan
from onnxlm.runtime.bench_child import Footprint
from onnxlm.runtime.bench_figures import Speed, Spread
from onnxlm.runtime.machine import Machine

SCHEMA = "onnxlm.bench/1"
HEADER = (
    "model",
    "provider",
    "precision",
    "prompt",
    "KL",
    "top-1",
    "load s",
    "TTFT ms",
    "prefill tok/s",
    "decode tok/s",
    "p95 ms",
    "peak RSS MB",
    "PSS MB",
    "file MB",
)
# Columns of words; the rest are numbers.
LEFT = 3
# From here on others disturb the figures.
BUSY_CORES = 0.2


@dataclass(frozen=True)
class Label:
    """What is known of a contestant before it runs.

    Attributes:
        model: A package's folder, or what a baseline is.
        provider: The execution provider asked for, or a baseline's library.
        ort_name: ONNX Runtime's name of that provider; None for a baseline.
        precision: Of the weights.
        file_bytes: Size of graphs and weights; None for a baseline.
        quality: "kl" and "top1" against the full-precision model, as the manifest has them.
        baseline: Packages are compared with it.
    """

    model: str
    provider: str
    ort_name: str | None
    precision: str
    file_bytes: int | None = None
    quality: Mapping[str, float] = field(default_factory=dict)
    baseline: bool = False


@dataclass(frozen=True)
class Row:
    """Figures of one contestant at one prompt length; None is what was not measured.

    Attributes:
        label: Who.
        prompt_tokens: Length of the prompt.
        repeats: Rounds that the figures are of.
        failure: Why it was not run, or not to the end.
        runs_on: ONNX Runtime's name of the provider that really ran, or a baseline's library.
        footprint: Load time and memory, with the longest prompt.
        speed: The figures.
    """

    label: Label
    prompt_tokens: int
    repeats: int
    failure: str | None
    runs_on: str | None
    footprint: Footprint | None
    speed: Speed | None

    def cells(self) -> tuple[str, ...]:
        """Texts under `HEADER`; `remark` says why a row has no speed."""
        quality, footprint, size = self.label.quality, self.footprint, self.label.file_bytes
        speed: tuple[str, ...] = ("not run", "-", "-", "-")
        if self.speed is not None:
            speed = (
                _spread(self.speed.ttft_ms),
                _spread(self.speed.prefill_tokens_per_s),
                _spread(self.speed.decode_tokens_per_s),
                _number(self.speed.decode_p95_ms, ".1f"),
            )
        return (
            self.label.model,
            self._provider(),
            self.label.precision,
            str(self.prompt_tokens),
            _number(quality.get("kl"), ".4f"),
            _number(quality.get("top1"), ".3f"),
            _number(footprint.load_s if footprint else None, ".2f"),
            *speed,
            _megabytes(footprint.peak_rss_bytes if footprint else None),
            _megabytes(footprint.pss_bytes if footprint else None),
            _megabytes(size),
        )

    def _provider(self) -> str:
        """The provider asked for, and the one that ran where that is another."""
        wanted, active = self.label.ort_name, self.runs_on
        if wanted is None or active is None or wanted == active:
            return self.label.provider
        return f"{self.label.provider} (ran on {active.removesuffix('ExecutionProvider')})"

    def remark(self) -> str | None:
        """Why there are no figures, or of fewer rounds; None when nothing is amiss."""
        who = f"{self.label.model} on {self.label.provider}, prompt {self.prompt_tokens}"
        if self.speed is None:
            return f"not run: {who}: {self.failure}"
        if self.failure is not None:
            return f"stopped after {self.repeats} rounds: {who}: {self.failure}"
        return None


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
        machine: What it ran on.
        threads: Threads inside an operator.
        plan: What each contestant ran.
        foreign_load_cores: Cores that other processes used during a run, median; None where the system
            does not tell.
        interrupted: It was stopped; rows hold what was done.
        rows: By contestant, then by prompt length.
        schema: Name and version of this form.
    """

    machine: Machine
    threads: int
    plan: Plan
    foreign_load_cores: float | None
    interrupted: bool
    rows: tuple[Row, ...]
    schema: str = SCHEMA

    def to_json(self) -> str:
        """The whole report."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    def remarks(self) -> list[str]:
        """What rows have to say, a line each."""
        return [line for row in self.rows if (line := row.remark()) is not None]

    def ratios(self) -> list[str]:
        """How much faster packages are than the baselines, a line for each pair and prompt length."""
        lines = []
        for base in self.rows:
            for row in self.rows:
                if not base.label.baseline or row.label.baseline or base.speed is None:
                    continue
                if row.prompt_tokens == base.prompt_tokens and row.speed is not None:
                    lines.append(
                        f"{row.label.model} on {row.label.provider} by {base.label.model}, "
                        f"prompt {row.prompt_tokens}: {_ratio(row.speed, base.speed)}"
                    )
        return lines

    def notes(self) -> list[str]:
        """What to know of all figures."""
        missing = {row.footprint.note for row in self.rows if row.footprint is not None}
        lines = sorted(note for note in missing if note)
        if self.foreign_load_cores is not None and self.foreign_load_cores >= BUSY_CORES:
            lines.append(
                f"other processes kept {self.foreign_load_cores:.1f} cores busy meanwhile: "
                "the figures are lower than those of an idle machine"
            )
        return lines


def _ratio(speed: Speed, base: Speed) -> str:
    prefill = speed.prefill_tokens_per_s.median / base.prefill_tokens_per_s.median
    text = f"prefill {prefill:.1f}x"
    if speed.decode_tokens_per_s is None or base.decode_tokens_per_s is None:
        return text
    return (
        f"{text}, decode {speed.decode_tokens_per_s.median / base.decode_tokens_per_s.median:.1f}x"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:.0f}"


def _spread(value: Spread | None) -> str:
    """The median with its spread: 131 (128-135)."""
    return "-" if value is None else f"{value.median:.0f} ({value.low:.0f}-{value.high:.0f})"
