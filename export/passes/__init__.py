"""Graph passes, one rule a file: `apply(model) -> int` returns how often the rule fired.

Legend of shapes: B rows, S new tokens, H hidden size, K and N a weight's inputs and outputs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable

import onnx_ir as ir


def pass_names() -> list[str]:
    """Every pass of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find_pass(name: str) -> Callable[[ir.Model], int]:
    """The `apply` function of `export/passes/<name>.py`."""
    apply: Callable[[ir.Model], int] = importlib.import_module(f"{__name__}.{name}").apply
    return apply


def run_passes(model: ir.Model, names: Iterable[str]) -> dict[str, int]:
    """Run passes in order, in place.

    Returns:
        Pass name -> how often it fired.

    Raises:
        RuntimeError: A pass failed; names it and those that ran before it.
    """
    counts: dict[str, int] = {}
    for name in names:
        try:
            counts[name] = find_pass(name)(model)
        except Exception as error:
            raise RuntimeError(f"pass {name} failed after {list(counts)}: {error}") from error
    return counts
