"""Generation from a package with ONNX Runtime and numpy; neither torch, onnx nor transformers is imported."""

from onnxlm.runtime.chat import Chat
from onnxlm.runtime.model import Generation, LanguageModel, load
from onnxlm.runtime.text_iterator import AsyncTextIterator, TextIterator

__all__ = ["AsyncTextIterator", "Chat", "Generation", "LanguageModel", "TextIterator", "load"]
