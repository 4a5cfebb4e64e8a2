"""Generation from a package with ONNX Runtime and numpy; neither torch, onnx nor transformers is imported."""

from onnxlm.runtime.model import Generation, LanguageModel, load

__all__ = ["Generation", "LanguageModel", "load"]
