"""Worker for a package of onnxlm. Arguments: FOLDER THREADS."""

from __future__ import annotations

import numpy as np
import onnxruntime
from protocol import serve

from onnxlm import __version__
from onnxlm.runtime import load
from onnxlm.runtime.engine import Batch


class PackageModel:
    """One batch of one row at a time over a package's sessions."""

    def __init__(self, folder: str, threads: int) -> None:
        self._model = load(folder, threads=threads)
        self._batch = Batch(self._model.sessions, 1)
        self.version = f"onnxlm {__version__}, onnxruntime {onnxruntime.__version__}"
        manifest = self._model.package.manifest
        graphs = {graph.file for graph in manifest.graphs.values()}
        self.bytes = sum(manifest.files[name].bytes for name in graphs | {manifest.weights.file})

    def prefill(self, ids: list[int], new_tokens: int) -> None:
        """Run a prompt in a new batch."""
        self._batch = Batch(self._model.sessions, 1)
        self._batch.set_tokens(self._batch.prefill_tokens([ids]))

    def step(self) -> None:
        """One greedy step."""
        self._batch.decode_tokens()

    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """Logits behind each token, float32 [len(ids), vocab]; a single token runs the decode graph."""
        if first:
            self._batch = Batch(self._model.sessions, 1)
        if len(ids) > 1 or first:
            return self._batch.prefill_all_logits(ids)
        self._batch.set_tokens(np.array(ids, dtype=np.int64))
        return self._batch.decode_logits()


serve(lambda arguments: PackageModel(arguments[0], int(arguments[1])))
