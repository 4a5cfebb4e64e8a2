"""Two reports of a benchmark: what changed, and whether that exceeds the noise.

A figure of the rounds has changed when all three hold:

* the rounds of the two reports differ by the two-sided Mann-Whitney test at 5%: the chance that two samples
  of one source lie as far apart as these, in ranks, so that no outlier counts for more than one;
* the medians differ by more than `LEAST`, what the same files differ by between two runs on a quiet machine;
* the medians differ by more than the machine itself did with the same threads: its memory where decoding is
  compared, its arithmetic where prefill is.

The two runs were not interleaved with each other, which is why the machine's own rates, which were
interleaved with each, have a say. At four rounds in each the test can find a change; at three it cannot.
What is measured once (load, memory) or not at all (size, quality) is put side by side and not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_rank_test import mann_whitney
from onnxlm.runtime.bench_report import Contestant, Curve, Report, Row
from onnxlm.runtime.bench_tables import Table, describe, number

ALPHA = 0.05
LEAST = 0.03
_DECODE = "decode_tokens_per_s"
# Figure of a round -> whether more is better.
_FIGURES = {"ttft_ms": False, "prefill_tokens_per_s": True, _DECODE: True}
_TITLES = {"ttft_ms": "TTFT ms", "prefill_tokens_per_s": "prefill tok/s", _DECODE: "decode tok/s"}
RULE = (
    f"changed: the rounds differ (Mann-Whitney, p <= {ALPHA}) and the medians by more than {LEAST:.0%} and "
    "by more than the machine itself; -: not judged"
)
# What two reports are matched by: model, provider as it ran, threads.
_Who = tuple[str, str, int]


@dataclass(frozen=True)
class Change:
    """One figure in two reports.

    Attributes:
        who: The contestant and its case, in words.
        figure: Name of the figure.
        old: In the old report, the median where there are rounds.
        new: The same of the new one.
        p: Of the Mann-Whitney test; None where there are no rounds to test.
        floor: Least change of the median that counts, as a share of the old one; None where none is judged.
        more_is_better: Of the figure.
    """

    who: str
    figure: str
    old: float
    new: float
    p: float | None = None
    floor: float | None = None
    more_is_better: bool = False

    @property
    def change(self) -> float | None:
        """New by old, less one; None of nothing."""
        return self.new / self.old - 1 if self.old else None

    @property
    def verdict(self) -> str:
        """Whether it is "better", "worse", or "noise"; "-" where nothing is judged."""
        if self.p is None or self.floor is None or self.change is None:
            return "-"
        if self.p > ALPHA or abs(self.change) <= self.floor:
            return "noise"
        return "better" if (self.change > 0) == self.more_is_better else "worse"


def compare(old: Report, new: Report) -> list[Change]:
    """Figures that both reports hold: of the same model, provider, threads and case."""
    return [
        *_compare_rows(old, new),
        *_compare_curves(old, new),
        *_compare_contestants(old, new),
    ]


def _compare_rows(old: Report, new: Report) -> Iterator[Change]:
    before = {_key(old, row): row for row in old.rows}
    drifts = machine_drift(old, new)
    for row in new.rows:
        other = before.get(_key(new, row))
        if other is None:
            continue
        label = new.who(row).label
        for figure, more in _FIGURES.items():
            a, b = _rounds(other, figure), _rounds(row, figure)
            drift = drifts.get(label.threads, {}).get(_bound_by(figure, label.precision), 0.0)
            if a and b:
                yield _tested((describe(new, row), _TITLES[figure]), (a, b), drift, more)


def _compare_curves(old: Report, new: Report) -> Iterator[Change]:
    """Each context length that both have; files of the version before hold no rounds of it."""
    before = {
        (*_who(old.who(curve)), curve.case.batch, point.context_length): point
        for curve in old.curves
        for point in curve.points
    }
    drifts = machine_drift(old, new)
    for curve in new.curves:
        who = new.who(curve)
        drift = drifts.get(who.label.threads, {}).get("read_bytes_per_s", 0.0)
        for point in curve.points:
            other = before.get((*_who(who), curve.case.batch, point.context_length))
            if other is None:
                continue
            names = (describe(new, curve), f"{_TITLES[_DECODE]} after {point.context_length}")
            if other.rounds and point.rounds:
                yield _tested(names, (other.rounds, point.rounds), drift, more=True)
            else:
                medians = (other.decode_tokens_per_s.median, point.decode_tokens_per_s.median)
                yield Change(*names, *medians)


def _compare_contestants(old: Report, new: Report) -> Iterator[Change]:
    """Load, memory, size and quality; where the largest case is another, memory says nothing."""
    alike = old.plan.cases == new.plan.cases
    before = {_who(who): _measured_once(who, alike) for who in old.contestants}
    for who in new.contestants:
        label, earlier = who.label, before.get(_who(who), {})
        threads = f", threads {label.threads}" if _has_several_threads(new) else ""
        for figure, value in _measured_once(who, alike).items():
            if figure in earlier:
                words = f"{label.model} on {who.provider}{threads}"
                yield Change(words, figure, earlier[figure], value)


def _tested(
    names: tuple[str, str],
    rounds: tuple[Sequence[float], Sequence[float]],
    drift: float,
    more: bool,
) -> Change:
    old, new = (float(np.median(values)) for values in rounds)
    return Change(*names, old, new, mann_whitney(*rounds), max(LEAST, drift), more)


def _measured_once(who: Contestant, case_too: bool) -> dict[str, float]:
    """By title, as far as they are known, with those of the largest case or without."""
    found, label = who.footprint, who.label
    figures: dict[str, float | None] = {}
    if found is not None:
        figures["load s"] = found.load_s
    if found is not None and case_too:
        figures["first run s"] = found.first_run_s
        figures["peak RSS MB"] = _megabytes(found.peak_rss_bytes)
        figures["PSS MB"] = _megabytes(found.pss_bytes)
        figures["device MB"] = _megabytes(found.device_bytes)
    figures["file MB"] = _megabytes(label.file_bytes)
    figures["KL"] = label.quality.get("kl")
    figures["top-1"] = label.quality.get("top1")
    return {title: value for title, value in figures.items() if value is not None}


def _megabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e6


def _has_several_threads(report: Report) -> bool:
    return len({who.label.threads for who in report.contestants}) > 1


def unmatched(old: Report, new: Report) -> list[str]:
    """Rows and curves that only one of the reports has figures of, a line each."""
    lines = []
    for name, report, other in (("old", old, new), ("new", new, old)):
        held = {_key(other, row) for row in other.results if row.repeats}
        keys = dict.fromkeys(_key(report, row) for row in report.results if row.repeats)
        for model, provider, threads, case in keys:
            if (model, provider, threads, case) in held:
                continue
            lengths = ", ".join(map(str, case.context_lengths))
            what = f"prompt {case.prompt_tokens}, new {case.new_tokens}, batch {case.batch}"
            if lengths:
                what = f"context lengths {lengths}, batch {case.batch}"
            lines.append(
                f"only in the {name} report: {model} on {provider}, threads {threads}, {what}"
            )
    return lines


def compare_table(changes: Sequence[Change]) -> Table:
    """The changes, a line each."""
    rows = tuple(
        (
            change.who,
            change.figure,
            number(change.old),
            number(change.new),
            "-" if change.change is None else f"{change.change:+.1%}",
            "-" if change.p is None else f"{change.p:.3f}",
            "-" if change.floor is None else f"{change.floor:.1%}",
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
    if figure == _DECODE:
        return "read_bytes_per_s"
    return "int8_ops_per_s" if precision.startswith("int") else "fp32_flops_per_s"


def _who(who: Contestant) -> _Who:
    """What fell back is another contestant than what ran where it was asked to."""
    return who.label.model, who.provider, who.label.threads


def _key(report: Report, row: Row | Curve) -> tuple[str, str, int, Case]:
    return (*_who(report.who(row)), row.case)


def _rounds(row: Row, figure: str) -> list[float]:
    return [value for r in row.rounds if (value := getattr(r, figure)) is not None]
