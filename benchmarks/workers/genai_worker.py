"""Worker for onnxruntime-genai: a folder of its model builder. Arguments: FOLDER THREADS."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
from protocol import serve

CONTEXT = 2048


class GenAi:
    """One generator at a time over a model."""

    def __init__(self, folder: str, threads: int) -> None:
        config = genai.Config(folder)
        options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
        config.overlay(json.dumps(options))
        self._model = genai.Model(config)
        self._generator: genai.Generator | None = None
        self.version = f"onnxruntime-genai {version('onnxruntime-genai')}"
        self.bytes = sum(file.stat().st_size for file in Path(folder).glob("*.onnx*"))

    def prefill(self, ids: list[int], new_tokens: int) -> None:
        """Run a prompt in a new generator and take the first token."""
        self._generator = self._start(len(ids) + new_tokens)
        self._generator.append_tokens(np.array(ids, dtype=np.int32))
        self._generator.generate_next_token()

    def step(self) -> None:
        """Run the last token and take the next."""
        self._generator.generate_next_token()

    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """Logits behind each token, float32 [len(ids), vocab]."""
        if first:
            self._generator = self._start(CONTEXT)
        self._generator.append_tokens(np.array(ids, dtype=np.int32))
        return np.asarray(self._generator.get_output("logits"))[0]

    def _start(self, length: int) -> genai.Generator:
        params = genai.GeneratorParams(self._model)
        # A least length equal to the greatest: an end-of-text token must not end a measurement.
        params.set_search_options(do_sample=False, max_length=length, min_length=length)
        return genai.Generator(self._model, params)


serve(lambda arguments: GenAi(arguments[0], int(arguments[1])))
