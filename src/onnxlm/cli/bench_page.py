"""A benchmark's report as Markdown, and as one page with plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from onnxlm.cli.charts import Bar, Dot, Drawing, Series, bar_chart, line_chart, scatter_chart
from onnxlm.cli.page import write_page
from onnxlm.runtime.bench_compare import RULE
from onnxlm.runtime.bench_tables import describe, number, ratios, remarks, spread, summary, tables

if TYPE_CHECKING:
    from onnxlm.runtime.bench_report import Report, Row
    from onnxlm.runtime.bench_tables import Table


def markdown(report: Report, changes: Table | None = None) -> str:
    """The tables in GitHub's Markdown."""
    parts = ["# Benchmark", summary(report)]
    for table in (*tables(report), *(() if changes is None else (changes,))):
        parts += [f"## {table.title}", _markdown_table(table)]
    if changes is not None:
        parts.append(RULE)
    lines = _lines(report)
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    marks = ["---" if i < table.left else "--:" for i in range(len(table.header))]
    rows = [table.header, marks, *table.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )


def page(report: Report, changes: Table | None = None) -> str:
    """One HTML page: latency by contestant, speed by context, size beside speed and quality, the tables."""
    machine = report.machine
    facts = [
        ("Processor", machine.cpu),
        ("Cores", str(machine.cores)),
        ("Memory", f"{(machine.memory_bytes or 0) / 1e9:.0f} GB" if machine.memory_bytes else "-"),
        ("System", machine.os),
        *_versions(report),
        ("Measured", report.created),
    ]
    lead = f"{report.rounds_done} interleaved rounds; bars and lines are medians, whiskers the rounds' ends"
    made = (*tables(report), *(() if changes is None else (changes,)))
    notes = _lines(report) if changes is None else [*_lines(report), RULE]
    return write_page(("onnxlm bench", lead), facts, drawings(report), made, notes)


def _versions(report: Report) -> list[tuple[str, str]]:
    """Of Python and of each library; where interpreters differ, with the providers that each version ran."""
    found: dict[str, dict[str, list[str]]] = {}
    for who in report.contestants:
        for name, version in who.libraries.items():
            providers = found.setdefault(name, {}).setdefault(version, [])
            if who.label.provider not in providers:
                providers.append(who.label.provider)
    # What no contestant told, as where nothing ran: of the process that wrote the report.
    for name, version in {"python": report.machine.python, **report.machine.libraries}.items():
        found.setdefault(name, {version: []})
    facts = []
    for name in sorted(found, key=lambda name: (name != "python", name)):
        versions = found[name]
        texts = [f"{text} ({', '.join(who)})" for text, who in versions.items()]
        title = "Python" if name == "python" else name
        facts.append((title, ", ".join(versions if len(versions) == 1 else texts)))
    return facts


def drawings(report: Report) -> list[Drawing]:
    """The plots that the report has figures for."""
    made = (_first_token(report), _steps(report), _by_context(report), _by_size(report))
    return [drawing for drawing in made if drawing is not None]


def _lines(report: Report) -> list[str]:
    return [*remarks(report), *ratios(report), *report.notes()]


def _first_token(report: Report) -> Drawing | None:
    def bar(row: Row) -> Bar | None:
        if row.speed is None:
            return None
        return Bar(
            label=describe(report, row),
            parts=((row.speed.ttft_ms.median, row.contestant),),
            text=number(row.speed.ttft_ms.median),
            ends=(row.speed.ttft_ms.low, row.speed.ttft_ms.high),
            hint=f"{spread(row.speed.prefill_tokens_per_s)} prompt tokens a second",
        )

    bars = _by_case(report, bar)
    caption = "From the prompt's ids to the first new token. Shorter is better."
    return bar_chart("Time to first token", caption, "milliseconds", bars) if bars else None


def _steps(report: Report) -> Drawing | None:
    def bar(row: Row) -> Bar | None:
        speed = row.speed
        if speed is None or speed.decode_p50_ms is None or speed.decode_p99_ms is None:
            return None
        return Bar(
            label=describe(report, row),
            parts=((speed.decode_p50_ms, row.contestant),),
            text=f"{number(speed.decode_p50_ms)} (p99 {number(speed.decode_p99_ms)})",
            ends=(speed.decode_p50_ms, speed.decode_p99_ms),
            hint=f"{spread(speed.decode_tokens_per_s)} tokens a second",
        )

    bars = _by_case(report, bar)
    caption = "Half of the steps take no longer than the bar, 99 in 100 no longer than its whisker."
    axis = "milliseconds a step"
    return bar_chart("Time of a decode step", caption, axis, bars) if bars else None


def _by_context(report: Report) -> Drawing | None:
    series = []
    # A contestant keeps its colour from plot to plot, unless it has several lines here.
    alone = len({curve.case for curve in report.curves}) == 1
    for i, curve in enumerate(report.curves):
        points = tuple(
            (float(point.context_length), rate.median, rate.low, rate.high)
            for point in curve.points
            for rate in (point.decode_tokens_per_s,)
        )
        if points:
            colour = curve.contestant if alone else i
            series.append(Series(describe(report, curve), points, colour))
    caption = "Bands reach from the slowest to the fastest round. Higher is better."
    axes = ("tokens in the cache of each row", "decode, tokens a second")
    return line_chart("Decode speed by context", caption, axes, series) if series else None


def _by_size(report: Report) -> Drawing | None:
    """Each package with the settings that decode fastest."""
    best: dict[tuple[str, str], Row] = {}
    for row in report.rows:
        who = report.who(row)
        size = who.label.file_bytes
        if size is None or row.speed is None or row.speed.decode_tokens_per_s is None:
            continue
        key = (who.label.model, who.provider)
        if key not in best or _decode(row) > _decode(best[key]):
            best[key] = row
    dots = []
    for row in best.values():
        who = report.who(row)
        quality, precision = who.label.quality, who.label.precision
        words = [precision]
        words += [f"KL {quality['kl']:.4f}"] if "kl" in quality else []
        words += [f"top-1 {quality['top1']:.1%}"] if "top1" in quality else []
        if not quality and precision.startswith("int"):
            words.append("no quality recorded")
        label = f"{who.label.model} on {who.provider}"
        megabytes = (who.label.file_bytes or 0) / 1e6
        dots.append(Dot(megabytes, _decode(row), label, ", ".join(words), row.contestant))
    caption = (
        "KL divergence and top-1 agreement are against the full-precision model, as the packages record "
        "them; upper left is better. Of several settings the fastest is shown."
    )
    axes = ("size of graphs and weights, MB", "decode, tokens a second")
    return scatter_chart("Size, speed and quality", caption, axes, dots) if dots else None


def _by_case(report: Report, draw: Callable[[Row], Bar | None]) -> list[Bar]:
    """Bars of the rows that have one, an empty place between two cases."""
    bars: list[Bar] = []
    for case in report.plan.cases:
        drawn = [draw(row) for row in report.rows if row.case == case]
        found = [bar for bar in drawn if bar is not None]
        if bars and found:
            bars.append(Bar("", (), ""))
        bars += found
    return bars


def _decode(row: Row) -> float:
    found = row.speed.decode_tokens_per_s if row.speed else None
    return found.median if found else 0.0
