"""Trained models: configs, eager reference modules, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxlm.models.loading import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # Lazy: onnxlm.models.layers must be importable while this package is being imported.
    if name == "load":
        from onnxlm.models.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
