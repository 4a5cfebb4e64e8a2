"""Output: colours, tables with lines and bars on a terminal; plain, stable text anywhere else."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onnxlm.progress import Progress, silent

if TYPE_CHECKING:
    from rich import progress as rich_progress

_UNITS = ("kB", "MB", "GB", "TB")
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB")


def print_json(value: Any) -> None:
    """Print one JSON value."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """Say something beside the result, on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")


def aside(text: str) -> None:
    """As `note`, but dim where standard error is a terminal: what a reader may pass over."""
    if not sys.stderr.isatty():
        note(text)
        return
    from rich.console import Console
    from rich.text import Text

    sys.stdout.flush()
    Console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table.

    Args:
        header: Column titles.
        rows: Cells.
        left: How many columns, from the first, are text; the rest are numbers, flush right.
    """
    if sys.stdout.isatty():
        _print_rich_table(header, rows, left)
        return
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def _print_rich_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, title in enumerate(header):
        table.add_column(title, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: brackets in a cell are no markup
    Console().print(table)


def size(count: int) -> str:
    """A number of bytes in decimal units, as files have: 141.3 MB."""
    return _in_units(count, 1000, _UNITS)


def memory(count: int) -> str:
    """A number of bytes in binary units, as memory has: 4.5 MiB."""
    return _in_units(count, 1024, _BINARY_UNITS)


def _in_units(count: int, step: int, units: Sequence[str]) -> str:
    value, unit = float(count), "B"
    for larger in units:
        if value < step:
            break
        value, unit = value / step, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars on standard error, one a stage, where that is a terminal; silence elsewhere."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        stages = _Stages(bars)
        yield stages.update
        stages.finish()


class _Stages:
    """A bar for each stage; a stage ends when the next begins."""

    def __init__(self, bars: rich_progress.Progress) -> None:
        self._bars = bars
        self._stage: str | None = None
        self._task: rich_progress.TaskID | None = None

    def update(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.finish()
            self._stage = stage
            self._task = self._bars.add_task(stage, total=total or None)
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total or None)

    def finish(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, total=1, completed=1)
