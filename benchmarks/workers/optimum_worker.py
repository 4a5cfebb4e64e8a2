"""Worker for optimum's ORTModelForCausalLM: a folder of its exporter. Arguments: FOLDER THREADS."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM
from protocol import serve


class Optimum:
    """The model with its key-value cache; called as its own `generate` calls it, without that one's work."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        (file,) = Path(folder).glob("*.onnx")  # a quantized one has another name
        self._model = ORTModelForCausalLM.from_pretrained(
            folder, file_name=file.name, session_options=options
        )
        self._past = None
        self._length = 0
        self._token = torch.zeros(1, 1, dtype=torch.int64)
        self.version = (
            f"optimum-onnx {version('optimum-onnx')}, onnxruntime {version('onnxruntime')}"
        )
        self.bytes = sum(file.stat().st_size for file in Path(folder).glob("*.onnx*"))

    def prefill(self, ids: list[int], new_tokens: int) -> None:
        """Run a prompt from an empty cache; its arg-max is the next token."""
        self._forget()
        self._token = self._run(torch.tensor([ids]))[:, -1:].argmax(-1)

    def step(self) -> None:
        """Run the token; its arg-max is the next."""
        self._token = self._run(self._token)[:, -1:].argmax(-1)

    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """Logits behind each token, float32 [len(ids), vocab]."""
        if first:
            self._forget()
        return self._run(torch.tensor([ids]))[0].numpy()

    def _forget(self) -> None:
        self._past, self._length = None, 0

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        total = self._length + ids.shape[1]
        answer = self._model(
            input_ids=ids,
            attention_mask=torch.ones(1, total, dtype=torch.int64),
            position_ids=torch.arange(self._length, total)[None],
            past_key_values=self._past,
            use_cache=True,
        )
        self._past, self._length = answer.past_key_values, total
        return answer.logits


serve(lambda arguments: Optimum(arguments[0], int(arguments[1])))
