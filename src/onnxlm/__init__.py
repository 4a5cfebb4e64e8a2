"""onnxlm: trained Transformers as portable ONNX packages, quantized, run and proved."""

from onnxlm.version import VERSION as __version__

__all__ = ["__version__"]
