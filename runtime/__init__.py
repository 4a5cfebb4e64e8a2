"""Generation from a package with ONNX Runtime and numpy; neither torch, onnx nor transformers is imported."""

from onnxlm.runtime.chat import Chat
from onnxlm.runtime.generation import Generation
from onnxlm.runtime.logprobs import TokenLogprob
from onnxlm.runtime.model import LanguageModel, load
from onnxlm.runtime.text_iterator import AsyncTextIterator, TextIterator

__all__ = [
    "AsyncTextIterator",
    "Chat",
    "Generation",
    "LanguageModel",
    "TextIterator",
    "TokenLogprob",
    "load",
]
