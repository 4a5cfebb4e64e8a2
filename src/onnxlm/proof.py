"""What a verification found, as data: for the command line's table, for JSON, for a manifest."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxlm.quality import Quality

CHECK_HEADER = ("check", "result", "compared", "largest difference", "allowed")
QUALITY_HEADER = ("path", "verdict", "tokens", "KL", "top-1", "perplexity", "reference", "change")


@dataclass(frozen=True)
class Check:
    """One comparison with the full-precision model.

    Attributes:
        name: What was run.
        compared: Positions or tokens.
        difference: Largest absolute difference of two logits; infinite where one is no number.
        allowed: The largest that passes.
        note: What else a reader should know.
    """

    name: str
    compared: int
    difference: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the difference is allowed."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Divergence:
    """Where a failed check's last call leaves the model.

    Attributes:
        check: The check.
        graph: The graph that the call runs.
        place: "the embedding", "layer 3", "the head", or None when the difference is gone once every layer is
            observed, as when an optimisation of the session is at fault.
        layer: Its number, counted from 0, if it is a layer.
        allowed: The largest relative difference that passes.
        differences: For each place in order the largest difference at any token, relative to the largest
            value of that token where that is above 1.
    """

    check: str
    graph: str
    place: str | None
    layer: int | None
    allowed: float
    differences: Mapping[str, float]

    def __str__(self) -> str:
        where = f"{self.check}: {self.graph}.onnx"
        if self.place is None:
            return f"{where} agrees when every layer is observed: an optimisation of the session is at fault"
        found = self.differences[self.place]
        return (
            f"{where} first differs behind {self.place}: "
            f"relative difference {found:.2g}, allowed {self.allowed:.2g}"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of one verification.

    Attributes:
        package: The package's folder.
        reference: What it was held against.
        precision: The package's precision.
        lowering: Its lowering.
        provider: Where it ran.
        text: Where the tokens come from.
        checks: Parity of a full-precision package.
        divergence: Where the first failed check leaves the model.
        quality: Figures by path, "prefill" and "decode".
    """

    package: str
    reference: str
    precision: str
    lowering: str
    provider: str
    text: str
    checks: tuple[Check, ...] = ()
    divergence: Divergence | None = None
    quality: Mapping[str, Quality] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether something was checked, every check passed, and no path has collapsed."""
        verdicts = [figures.verdict for figures in self.quality.values()]
        return (
            bool(self.checks or verdicts)
            and all(check.ok for check in self.checks)
            and "collapsed" not in verdicts
        )

    def to_json(self) -> str:
        """Every figure; what is no finite number is null."""
        value = dataclasses.asdict(self)
        value["checks"] = [dataclasses.asdict(check) | {"ok": check.ok} for check in self.checks]
        value["quality"] = {path: figures.to_dict() for path, figures in self.quality.items()}
        return json.dumps(_finite({"ok": self.ok, **value}), indent=2, ensure_ascii=False)

    def check_rows(self) -> list[tuple[str, ...]]:
        """Cells under `CHECK_HEADER`."""
        return [
            (
                check.name,
                ("ok" if check.ok else "FAILED") + (f", {check.note}" if check.note else ""),
                str(check.compared),
                f"{check.difference:.2e}",
                f"{check.allowed:.2e}",
            )
            for check in self.checks
        ]

    def quality_rows(self) -> list[tuple[str, ...]]:
        """Cells under `QUALITY_HEADER`."""
        return [
            (
                path,
                figures.verdict,
                str(figures.tokens),
                f"{figures.kl:.4f}",
                f"{figures.top1:.3f}",
                f"{figures.perplexity:.4g}",
                f"{figures.perplexity_reference:.4g}",
                f"{figures.perplexity_change:+.2%}",
            )
            for path, figures in self.quality.items()
        ]

    def figures(self) -> tuple[dict[str, float], dict[str, Any]]:
        """What a manifest keeps of a report that is ok: its fields `quality` and `parity`."""
        quality = {
            f"{path}_{name}": float(value)
            for path, figures in self.quality.items()
            for name, value in dataclasses.asdict(figures).items()
        }
        parity = {
            check.name: {"difference": check.difference, "allowed": check.allowed}
            for check in self.checks
        }
        return quality, parity


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
