"""The eager PyTorch model as a contestant of the benchmark: what a user has without exporting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from onnxlm.runtime.bench import Rows


@dataclass
class EagerContestant:
    """The reference model in fp32 with a key-value cache, greedy.

    Attributes:
        source: Checkpoint that it is loaded from.
        threads: Threads of PyTorch; 0 is its own choice.
        compiled: Through `torch.compile`; it compiles at its first runs, which do not count.
    """

    source: str
    threads: int = 0
    compiled: bool = False
    _model: Any = None
    _past: Any = None
    _tokens: Any = None

    def prepare(self) -> str:
        """Load the checkpoint."""
        import torch

        from onnxlm.models import load

        if self.threads:
            torch.set_num_threads(self.threads)
        self._model = load(self.source)
        # As transformers does when it generates: the head runs on the last position alone.
        self._model.lm_head.register_forward_pre_hook(_last_position)
        if self.compiled:
            # One program for any lengths: the cache grows with every step.
            self._model = torch.compile(self._model, dynamic=True)
        return f"torch {torch.__version__}"

    def prefill(self, rows: Rows) -> None:
        """Run prompts from an empty cache."""
        self._past = None
        self.extend(rows)

    def extend(self, rows: Rows) -> None:
        """Run tokens behind those in the cache."""
        import torch

        self._advance(torch.tensor([list(row) for row in rows]))

    def step(self) -> None:
        """One greedy step."""
        self._advance(self._tokens)

    def _advance(self, ids: Tensor) -> None:
        import torch

        with torch.inference_mode():
            logits, self._past = self._model(ids, None, self._past)
            self._tokens = logits[:, -1:].argmax(dim=-1)


def _last_position(module: object, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0][:, -1:]
