"""Lowerings: how the project's custom ops become ONNX operators, one file a target.

Each file exposes one `LOWERING`; the registry maps file name -> module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxlm.errors import ExportError
from onnxlm.plugins import Registry


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


_LOWERINGS = Registry(__name__, "LOWERING", Lowering, "lowering is not known", ExportError)


def lowering_names() -> list[str]:
    """Available lowerings."""
    return _LOWERINGS.names()


def find_lowering(name: str) -> Lowering:
    """The lowering in file `name`.

    Raises:
        ExportError: There is none.
    """
    return _LOWERINGS.find(name)
