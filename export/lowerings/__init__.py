"""Lowerings: how the project's custom ops become ONNX operators, one file a target.

Each file exposes one `LOWERING`; the registry maps file name -> module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxlm.errors import ExportError


@dataclass(frozen=True)
class Lowering:
    """One way to spell the custom ops.

    Attributes:
        opset: ai.onnx opset of the graphs.
        state_update: "in_place" or "append", see `io_spec.StateSpec`.
        decompositions: Torch custom op -> function that calls `torch.onnx.ops.symbolic*`.
        passes: Names of the target's own graph passes (`export/passes/<name>.py`), in order.
    """

    opset: int
    state_update: str
    decompositions: Mapping[Any, Callable[..., Any]]
    passes: tuple[str, ...] = ()


def lowering_names() -> list[str]:
    """Available lowerings."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find_lowering(name: str) -> Lowering:
    """The lowering in file `name`.

    Raises:
        ExportError: There is none.
    """
    if name not in lowering_names():
        raise ExportError(
            "lowering is not known", found=repr(name), allowed=", ".join(lowering_names())
        )
    lowering = importlib.import_module(f"{__name__}.{name}").LOWERING
    if not isinstance(lowering, Lowering):
        raise TypeError(f"{name}.LOWERING is not a Lowering")
    return lowering
