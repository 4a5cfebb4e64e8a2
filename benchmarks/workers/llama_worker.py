"""Worker for llama.cpp: a GGUF file by the C interface, its defaults left alone. Arguments: FILE THREADS."""

from __future__ import annotations

import ctypes
import os

import llama_cpp as llama
import numpy as np
from protocol import CHUNK, serve

CONTEXT = 2048


class LlamaCpp:
    """One context of 2048 positions over a model."""

    def __init__(self, file: str, threads: int) -> None:
        llama.llama_backend_init()
        self._quiet = llama.llama_log_callback(
            lambda level, text, data: None
        )  # keeps the callback alive
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = llama.llama_model_load_from_file(
            file.encode(), llama.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = llama.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        params.n_outputs_max = params.n_outputs_max_per_seq = CHUNK
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context for {file}")
        self._batch = llama.llama_batch_init(CONTEXT, 0, 1)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._position = 0
        self._token = 0
        self.version = f"llama-cpp-python {llama.__version__}"
        self.bytes = os.path.getsize(file)

    def prefill(self, ids: list[int], new_tokens: int) -> None:
        """Run a prompt from an empty cache; its arg-max is the next token."""
        self._forget()
        self._decode(ids, every=False)
        self._token = int(self._logits(-1).argmax())

    def step(self) -> None:
        """Run the token; its arg-max is the next."""
        self._decode([self._token], every=False)
        self._token = int(self._logits(-1).argmax())

    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """Logits behind each token, float32 [len(ids), vocab]."""
        if first:
            self._forget()
        self._decode(ids, every=True)
        return np.stack([self._logits(i) for i in range(len(ids))])

    def _forget(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        self._position = 0

    def _decode(self, ids: list[int], every: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = self._position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == len(ids) - 1
        status = llama.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self._position += len(ids)

    def _logits(self, index: int) -> np.ndarray:
        row = llama.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(row, shape=(self._vocab,))


serve(lambda arguments: LlamaCpp(arguments[0], int(arguments[1])))
