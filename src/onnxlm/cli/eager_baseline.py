"""The eager PyTorch model as a contestant of the benchmark: what a user has without exporting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class EagerContestant:
    """The reference model in fp32 with a key-value cache, greedy.

    Attributes:
        source: Checkpoint that it is loaded from.
        threads: Threads of PyTorch; 0 is its own choice.
    """

    source: str
    threads: int = 0
    _model: Any = None
    _past: Any = None
    _token: int = 0

    def prepare(self) -> str:
        """Load the checkpoint."""
        import torch

        from onnxlm.models import load

        if self.threads:
            torch.set_num_threads(self.threads)
        self._model = load(self.source)
        # As transformers does when it generates: the head runs on the last position alone.
        self._model.lm_head.register_forward_pre_hook(_last_position)
        return f"torch {torch.__version__}"

    def prefill(self, ids: Sequence[int]) -> None:
        """Run a prompt from an empty cache."""
        self._past = None
        self._advance(ids)

    def step(self) -> None:
        """One greedy step."""
        self._advance([self._token])

    def _advance(self, ids: Sequence[int]) -> None:
        import torch

        with torch.inference_mode():
            logits, self._past = self._model(torch.tensor([list(ids)]), None, self._past)
            self._token = int(logits[0, -1].argmax())


def _last_position(module: object, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0][:, -1:]
