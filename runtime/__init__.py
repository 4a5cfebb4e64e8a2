"""Generation from a package with ONNX Runtime and numpy; neither torch, onnx nor transformers is imported."""

from onnxlm.runtime.chat import Chat
from onnxlm.runtime.model import Generation, LanguageModel, TextIterator, load

__all__ = ["Chat", "Generation", "LanguageModel", "TextIterator", "load"]
