"""One HTML page with everything in it: no script, no network, legible on light and on dark ground."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from onnxlm.cli.charts import Drawing

if TYPE_CHECKING:
    from onnxlm.runtime.bench_tables import Table


def write_page(
    head: tuple[str, str],
    facts: Sequence[tuple[str, str]],
    drawings: Sequence[Drawing],
    tables: Sequence[Table],
    notes: Sequence[str] = (),
) -> str:
    """The page's text.

    Args:
        head: Title and the line below it.
        facts: Names and values that hold for everything on it.
        drawings: Plots.
        tables: Tables below them.
        notes: What to know of the figures.
    """
    from jinja2 import Environment, StrictUndefined

    template = (files("onnxlm.data") / "report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(
        title=head[0], lead=head[1], facts=facts, drawings=drawings, tables=tables, notes=notes
    )
