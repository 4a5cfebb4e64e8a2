"""Worker for the PyTorch model in fp32, the truth. Arguments: SOURCE THREADS [--compile]."""

from __future__ import annotations

import numpy as np
import torch
from protocol import serve

from onnxlm.models import load


class Eager:
    """The reference model with its key-value cache, eager or through `torch.compile`."""

    def __init__(self, source: str, threads: int, compiled: bool) -> None:
        torch.set_num_threads(threads)
        self._model = load(source)
        # As transformers does when it generates: the head runs on the last position alone.
        self._model.lm_head.register_forward_pre_hook(self._last_only)
        self._all_positions = False
        self._past = None
        self._token = 0
        self.version = f"torch {torch.__version__}"
        self.bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        if compiled:
            # One program for any lengths: the cache grows with every step.
            self._model = torch.compile(self._model, dynamic=True)

    def prefill(self, ids: list[int], new_tokens: int) -> None:
        """Run a prompt from an empty cache."""
        self._past = None
        self._advance(ids)

    def step(self) -> None:
        """One greedy step."""
        self._advance([self._token])

    @torch.inference_mode()
    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """Logits behind each token, float32 [len(ids), vocab]."""
        self._all_positions = True
        past = None if first else self._past
        logits, self._past = self._model(torch.tensor([ids]), None, past)
        self._all_positions = False
        return logits[0].float().numpy()

    @torch.inference_mode()
    def _advance(self, ids: list[int]) -> None:
        logits, self._past = self._model(torch.tensor([ids]), None, self._past)
        self._token = int(logits[0, -1].argmax())

    def _last_only(self, module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return inputs[0] if self._all_positions else inputs[0][:, -1:]


serve(lambda arguments: Eager(arguments[0], int(arguments[1]), "--compile" in arguments[2:]))
