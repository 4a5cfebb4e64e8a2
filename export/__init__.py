"""Eager models -> ONNX packages: tracing, lowerings, passes, parity."""

from onnxlm.export.exporting import export

__all__ = ["export"]
