"""onnxlm: trained Transformers as portable ONNX packages, quantized, run and proved."""

from onnxlm.version import VERSION

__all__ = ["__version__"]
__version__ = VERSION
