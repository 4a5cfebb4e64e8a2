"""A report as tables of text, for a terminal, Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_figures import Spread
from onnxlm.runtime.bench_report import Contestant, Curve, Report, Row


@dataclass(frozen=True)
class Table:
    """Texts in rows.

    Attributes:
        title: What it shows.
        header: A title for each column.
        rows: Cells.
        left: Columns of words, from the first; the rest are numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int


# A column of the tables of cases: its title, and its cell of a contestant and a case.
_Column = tuple[str, Callable[[Contestant, Case], str]]
_SETTINGS: tuple[_Column, ...] = (
    ("threads", lambda who, case: str(who.label.threads)),
    ("prompt", lambda who, case: str(case.prompt_tokens)),
    ("new", lambda who, case: str(case.new_tokens)),
    ("batch", lambda who, case: str(case.batch)),
)


def tables(report: Report) -> list[Table]:
    """Every table of a report that has rows."""
    made = (speed_table(report), curve_table(report), load_table(report), rates_table(report))
    return [table for table in made if table.rows]


def summary(report: Report) -> str:
    """The machine, and what was the same for all."""
    same = [
        f"{title} {values.pop()}"
        for title, values in _values(report, report.rows).items()
        if len(values) == 1
    ]
    parts = [report.machine.cpu, f"{report.rounds_done} rounds: median (lowest-highest)", *same]
    return "; ".join([*parts, *_options(report)])


def _options(report: Report) -> list[str]:
    """Options of the sessions that were given, each once."""
    given = [who.label.options or {} for who in report.contestants]
    words = [f"{name} {value}" for options in given for name, value in options.items()]
    return list(dict.fromkeys(word.removesuffix(" True") for word in words))


def speed_table(report: Report) -> Table:
    """Latency and speed by contestant and case; columns that are the same everywhere are left out."""
    settings = _varying(report, report.rows)
    energy = any(row.speed and row.speed.energy_j_per_token for row in report.rows)
    header: tuple[str, ...] = ("model", "provider", "precision", *(title for title, _ in settings))
    header += ("TTFT ms", "prefill tok/s", "of roof", "decode tok/s", "of roof")
    header += ("p50 ms", "p95 ms", "p99 ms", *(("J/token",) if energy else ()))
    rows = []
    for row in report.rows:
        who = report.who(row)
        cells = (*_names(who), *(cell(who, row.case) for _, cell in settings))
        rows.append((*cells, *_speed_cells(row, energy)))
    return Table("Speed", header, tuple(rows), left=3)


def _speed_cells(row: Row, energy: bool) -> tuple[str, ...]:
    speed = row.speed
    if speed is None:
        return ("not run", *("-" for _ in range(8 if energy else 7)))
    cells = (
        spread(speed.ttft_ms),
        spread(speed.prefill_tokens_per_s),
        percent(row.prefill_of_roofline),
        spread(speed.decode_tokens_per_s),
        percent(row.decode_of_roofline),
        number(speed.decode_p50_ms),
        number(speed.decode_p95_ms),
        number(speed.decode_p99_ms),
    )
    return (*cells, spread(speed.energy_j_per_token)) if energy else cells


def curve_table(report: Report) -> Table:
    """Decode speed by the tokens in the cache, a column a length."""
    lengths = sorted({n for curve in report.curves for n in curve.case.context_lengths})
    settings = [(title, cell) for title, cell in _varying(report, report.curves) if title != "new"]
    header: tuple[str, ...] = ("model", "provider", "precision", *(title for title, _ in settings))
    header += tuple(f"after {length}" for length in lengths)
    rows: list[tuple[str, ...]] = []
    for curve in report.curves:
        who = report.who(curve)
        points = {p.context_length: spread(p.decode_tokens_per_s) for p in curve.points}
        cells = (*_names(who), *(cell(who, curve.case) for _, cell in settings))
        missing = "-" if curve.points else "not run"
        rows.append((*cells, *(points.get(length, missing) for length in lengths)))
    return Table("Decode tok/s by context length", header, tuple(rows), left=3)


def load_table(report: Report) -> Table:
    """What a contestant needs, and its quality."""
    known = ("model", "provider", "precision", "threads", "KL", "top-1", "file MB")
    held = [who.footprint for who in report.contestants if who.footprint is not None]
    on_device = any(footprint.device_bytes is not None for footprint in held)
    device = ("device MB",) if on_device else ()
    header = (*known, "load s", "first run s", "peak RSS MB", "PSS MB", *device)
    rows: list[tuple[str, ...]] = []
    for who in report.contestants:
        quality, footprint = who.label.quality, who.footprint
        size = who.label.file_bytes
        cells: tuple[str, ...] = (
            *_names(who),
            str(who.label.threads),
            _fixed(quality.get("kl"), 4),
            _fixed(quality.get("top1"), 3),
            megabytes(size),
        )
        if footprint is None:
            rows.append((*cells, "not run", "-", "-", "-", *("-" for _ in device)))
            continue
        rows.append(
            (
                *cells,
                _fixed(footprint.load_s, 2),
                _fixed(footprint.first_run_s, 2),
                megabytes(footprint.peak_rss_bytes),
                megabytes(footprint.pss_bytes),
                *(megabytes(footprint.device_bytes) for _ in device),
            )
        )
    return Table("Load, memory and quality", header, tuple(rows), left=3)


def rates_table(report: Report) -> Table:
    """What the machine itself did in the same rounds."""
    header = ("threads", "memory GB/s", "fp32 GFLOP/s", "int8 GOP/s")
    rows = tuple(
        (
            str(rate.threads),
            *(
                spread(_scaled(value, 1e-9))
                for value in (rate.read_bytes_per_s, rate.fp32_flops_per_s, rate.int8_ops_per_s)
            ),
        )
        for rate in report.rates
    )
    return Table("The machine's own rates", header, rows, left=0)


def remarks(report: Report) -> list[str]:
    """What ran elsewhere than asked for, why rows have no figures, or of fewer rounds, a line each."""
    lines = [line for who in report.contestants for line in _fallback(who)]
    for row in report.results:
        what = "" if isinstance(row, Row) else ", by context length"
        who = f"{describe(report, row)}{what}: {row.failure}"
        if not row.repeats:
            lines.append(f"not run: {who}")
        elif row.failure is not None:
            lines.append(f"stopped after {row.repeats} rounds: {who}")
    return lines


def _fallback(who: Contestant) -> list[str]:
    """The reason, and how many nodes each provider was given."""
    if who.fallback is None:
        return []
    parts = [f"fell back: {who.label.model} on {who.provider}: {who.fallback}"]
    for graph, found in (who.nodes or {}).items():
        counts = ", ".join(f"{sum(n.values())} on {_short(name)}" for name, n in found.items())
        parts.append(f"nodes of {graph}: {counts}")
    return ["; ".join(parts)]


def _short(ort_name: str) -> str:
    return ort_name.removesuffix("ExecutionProvider")


def ratios(report: Report) -> list[str]:
    """How much faster packages are than the baselines of the same source: of the rounds' own ratios.

    Their median, and their ends.
    """
    lines = []
    for base in report.rows:
        for row in report.rows:
            mine, theirs = report.who(row).label, report.who(base).label
            alike = row.case == base.case and mine.threads == theirs.threads
            alike = alike and mine.source == theirs.source
            if theirs.baseline and not mine.baseline and alike and row.rounds and base.rounds:
                parts = [f"prefill {_ratio(row, base, 'prefill_tokens_per_s')}"]
                if row.case.new_tokens > 1:
                    parts.append(f"decode {_ratio(row, base, 'decode_tokens_per_s')}")
                text = f"{describe(report, row)} by {theirs.model}: {', '.join(parts)}"
                lines.append(text)
    return lines


def describe(report: Report, row: Row | Curve) -> str:
    """A row in words: package on cpu, prompt 128."""
    who = report.who(row)
    words = [f"{who.label.model} on {who.provider}"]
    alike: Sequence[Row | Curve] = report.rows if isinstance(row, Row) else report.curves
    for title, cell in _varying(report, alike):
        words.append(f"{title} {cell(who, row.case)}")
    return ", ".join(words)


def _ratio(row: Row, base: Row, figure: str) -> str:
    pairs = zip(row.rounds, base.rounds, strict=False)  # one of the two may have stopped early
    found = [getattr(mine, figure) / getattr(theirs, figure) for mine, theirs in pairs]
    return f"{median(found):.1f}x ({min(found):.1f}-{max(found):.1f})"


def _names(who: Contestant) -> tuple[str, str, str]:
    return who.label.model, who.provider, who.label.precision


def _values(report: Report, rows: Sequence[Row | Curve]) -> dict[str, set[str]]:
    return {title: {cell(report.who(row), row.case) for row in rows} for title, cell in _SETTINGS}


def _varying(report: Report, rows: Sequence[Row | Curve]) -> list[_Column]:
    """Settings that are worth a column; the prompt always is one of a table of speed."""
    values = _values(report, rows)
    keep = {"prompt"} if rows and isinstance(rows[0], Row) else set()
    return [column for column in _SETTINGS if len(values[column[0]]) > 1 or column[0] in keep]


def _scaled(value: Spread, factor: float) -> Spread:
    return Spread(value.median * factor, value.low * factor, value.high * factor)


def spread(value: Spread | None) -> str:
    """The median with its ends: 131 (128-135)."""
    if value is None:
        return "-"
    digits = _digits(value.median)
    return f"{value.median:.{digits}f} ({value.low:.{digits}f}-{value.high:.{digits}f})"


def number(value: float | None) -> str:
    """Three digits or so."""
    return "-" if value is None else f"{value:.{_digits(value)}f}"


def percent(share: float | None) -> str:
    """A share: 63%."""
    return "-" if share is None else f"{share:.0%}"


def megabytes(value: int | None) -> str:
    """Bytes in millions."""
    return "-" if value is None else f"{value / 1e6:.0f}"


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _digits(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
