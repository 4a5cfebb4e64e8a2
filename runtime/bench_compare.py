"""Two reports of a benchmark: what changed, and whether that exceeds the noise.

A figure has changed when all three hold:

* the rounds of the two reports differ by the exact two-sided Mann-Whitney test at 5%: the chance that two
  samples of one source lie as far apart as these, in ranks, so that no outlier counts for more than one;
* the medians differ by more than `LEAST`, what the same files differ by between two runs on a quiet machine;
* the medians differ by more than the machine itself did with the same threads: its memory where decoding is
  compared, its arithmetic where prefill is.

The two runs were not interleaved with each other, which is why the machine's own rates, which were
interleaved with each, have a say. At four rounds in each the test can find a change; at three it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_report import Report, Row
from onnxlm.runtime.bench_tables import Table, describe, number

ALPHA = 0.05
LEAST = 0.03
# Figure of a round -> whether more is better.
_FIGURES = {"ttft_ms": False, "prefill_tokens_per_s": True, "decode_tokens_per_s": True}
_TITLES = {
    "ttft_ms": "TTFT ms",
    "prefill_tokens_per_s": "prefill tok/s",
    "decode_tokens_per_s": "decode tok/s",
}
RULE = (
    f"changed: the rounds differ (Mann-Whitney, p <= {ALPHA}) and the medians by more than {LEAST:.0%} and "
    "by more than the machine itself"
)


@dataclass(frozen=True)
class Change:
    """One figure in two reports.

    Attributes:
        who: The contestant and its case, in words.
        figure: Name of the figure.
        old: Median over the rounds of the old report.
        new: The same of the new one.
        p: Of the Mann-Whitney test.
        floor: Least change of the median that counts, as a share of the old one.
    """

    who: str
    figure: str
    old: float
    new: float
    p: float
    floor: float

    @property
    def change(self) -> float:
        """New by old, less one."""
        return self.new / self.old - 1

    @property
    def verdict(self) -> str:
        """Whether it is "better", "worse", or "noise"."""
        if self.p > ALPHA or abs(self.change) <= self.floor:
            return "noise"
        return "better" if (self.change > 0) == _FIGURES[self.figure] else "worse"


def compare(old: Report, new: Report) -> list[Change]:
    """Figures that both reports hold: of the same model, provider, threads and case."""
    before = {_key(old, row): row for row in old.rows}
    drifts = machine_drift(old, new)
    changes = []
    for row in new.rows:
        other = before.get(_key(new, row))
        if other is None or not other.rounds or not row.rounds:
            continue
        label = new.who(row).label
        drift = drifts.get(label.threads, {})
        for figure in _FIGURES:
            floor = max(LEAST, drift.get(_bound_by(figure, label.precision), 0.0))
            a, b = _rounds(other, figure), _rounds(row, figure)
            if a and b:
                medians = (float(np.median(a)), float(np.median(b)))
                p = mann_whitney(a, b)
                changes.append(Change(describe(new, row), figure, *medians, p, floor))
    return changes


def unmatched(old: Report, new: Report) -> list[str]:
    """Rows that only one of the reports holds, or that one of them has no figures of, a line each."""
    reports = {"old": old, "new": new}
    keys = {
        name: dict.fromkeys(_key(report, row) for row in report.rows if row.rounds).keys()
        for name, report in reports.items()
    }
    lines = []
    for name, other in (("old", "new"), ("new", "old")):
        for model, provider, threads, case in [key for key in keys[name] if key not in keys[other]]:
            lines.append(
                f"only in the {name} report: {model} on {provider}, threads {threads}, prompt "
                f"{case.prompt_tokens}, new {case.new_tokens}, batch {case.batch}"
            )
    return lines


def compare_table(changes: Sequence[Change]) -> Table:
    """The changes, a line each."""
    rows = tuple(
        (
            change.who,
            _TITLES[change.figure],
            number(change.old),
            number(change.new),
            f"{change.change:+.1%}",
            f"{change.p:.3f}",
            f"{change.floor:.1%}",
            change.verdict,
        )
        for change in changes
    )
    header = ("contestant", "figure", "old", "new", "change", "p", "noise floor", "verdict")
    return Table("Changes", header, rows, left=2)


def machine_drift(old: Report, new: Report) -> dict[int, dict[str, float]]:
    """How much each of the machine's own rates changed, as a share, by threads that both reports have."""
    before = {rates.threads: rates for rates in old.rates}
    return {
        rates.threads: {
            rate: abs(getattr(rates, rate).median / getattr(before[rates.threads], rate).median - 1)
            for rate in ("read_bytes_per_s", "fp32_flops_per_s", "int8_ops_per_s")
        }
        for rates in new.rates
        if rates.threads in before
    }


def _bound_by(figure: str, precision: str) -> str:
    """The rate of the machine that a figure depends on most."""
    if figure == "decode_tokens_per_s":
        return "read_bytes_per_s"
    return "int8_ops_per_s" if precision.startswith("int") else "fp32_flops_per_s"


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Exact two-sided p of the Mann-Whitney test, ties by middle ranks.

    Every way of dealing the pooled ranks to the two samples is counted; p is the share of those in which the
    sum of ranks lies as far from its mean as it does here (Mann and Whitney 1947, Lehmann 1975).
    """
    pooled = np.array([*a, *b])
    # Twice the middle ranks: whole numbers, ties or not.
    ranks = [int((pooled < value).sum() + (pooled <= value).sum()) + 1 for value in pooled]
    # ways[n][s]: subsets of n ranks that sum to s.
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in a)]
    for rank in ranks:
        for n in range(len(a), 0, -1):
            for total, count in ways[n - 1].items():
                ways[n][total + rank] = ways[n].get(total + rank, 0) + count
    deals = ways[len(a)]
    mean = len(a) * (len(pooled) + 1)
    far = abs(sum(ranks[: len(a)]) - mean)
    extreme = sum(count for total, count in deals.items() if abs(total - mean) >= far)
    return extreme / sum(deals.values())


def _key(report: Report, row: Row) -> tuple[str, str, int, Case]:
    label = report.who(row).label
    return (label.model, label.provider, label.threads, row.case)


def _rounds(row: Row, figure: str) -> list[float]:
    return [value for r in row.rounds if (value := getattr(r, figure)) is not None]
