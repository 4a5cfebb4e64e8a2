"""Full-precision packages -> quantized packages; needs onnx-ir, onnxruntime and numpy, never torch."""

from onnxlm.quantize.quantizing import QuantizeOptions, quantize

__all__ = ["QuantizeOptions", "quantize"]
