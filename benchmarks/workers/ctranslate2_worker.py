"""Worker for CTranslate2: a folder of its converter. Arguments: FOLDER THREADS."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ctranslate2
import numpy as np
from protocol import serve


class CTranslate2:
    """Its generator; it takes tokens as text and keeps its cache within a call."""

    def __init__(self, folder: str, threads: int) -> None:
        self._model = ctranslate2.Generator(
            folder, device="cpu", inter_threads=1, intra_threads=threads
        )
        names = (Path(folder) / "vocabulary.json").read_text(encoding="utf-8")
        self._names: list[str] = json.loads(names)
        self._seen: list[int] = []
        self.version = f"ctranslate2 {ctranslate2.__version__}"
        self.bytes = (Path(folder) / "model.bin").stat().st_size

    def generate(self, ids: list[int], new_tokens: int, token: Callable[[], None]) -> None:
        """Greedy tokens, told as they come."""

        def told(step: ctranslate2.GenerationStepResult) -> bool:
            token()
            return False  # go on

        self._model.generate_batch(
            [[self._names[i] for i in ids]],
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=told,
        )

    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """Logits behind each token, float32 [len(ids), vocab]; everything before runs again."""
        self._seen = list(ids) if first else self._seen + ids
        logits = np.array(self._model.forward_batch([self._seen]))
        return logits[0, -len(ids) :].astype(np.float32)


serve(lambda arguments: CTranslate2(arguments[0], int(arguments[1])))
