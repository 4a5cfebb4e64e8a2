"""Worker for OpenVINO GenAI: a folder of optimum-intel's exporter. Arguments: FOLDER THREADS."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from protocol import serve

GRAPH = "openvino_model.xml"


class Clock(genai.StreamerBase):
    """Tells of every token as it comes."""

    def __init__(self, token: Callable[[], None]) -> None:
        super().__init__()
        self._token = token

    def write(self, tokens: int | list[int]) -> genai.StreamingStatus:
        """One token, or those that came together."""
        for _ in tokens if isinstance(tokens, list) else (tokens,):
            self._token()
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


class OpenVino:
    """Its pipeline for speed; for logits, which that keeps to itself, the same graph with default options."""

    def __init__(self, folder: str, threads: int) -> None:
        self._graph = Path(folder) / GRAPH
        self._options = {"INFERENCE_NUM_THREADS": threads}
        # As the pipeline sets it, but without the cache that would skip a prompt the second time.
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = sys.maxsize
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.LLMPipeline(
            folder, "CPU", scheduler_config=scheduler, **self._options
        )
        self._request: openvino.InferRequest | None = None
        self._length = 0
        self.version = f"openvino-genai {version('openvino-genai')}"
        self.bytes = self._graph.with_suffix(".bin").stat().st_size

    def generate(self, ids: list[int], new_tokens: int, token: Callable[[], None]) -> None:
        """Greedy tokens, told as they come."""
        config = genai.GenerationConfig(
            max_new_tokens=new_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        self._pipeline.generate(
            openvino.Tensor(np.array([ids], dtype=np.int64)), config, Clock(token)
        )

    def feed(self, ids: list[int], first: bool) -> np.ndarray:
        """Logits behind each token, float32 [len(ids), vocab]."""
        if self._request is None:
            compiled = openvino.Core().compile_model(self._graph, "CPU", self._options)
            self._request = compiled.create_infer_request()
        if first:
            self._request.reset_state()
            self._length = 0
        total = self._length + len(ids)
        answer = self._request.infer(
            {
                "input_ids": np.array([ids], dtype=np.int64),
                "attention_mask": np.ones((1, total), dtype=np.int64),
                "position_ids": np.arange(self._length, total, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        self._length = total
        return np.array(answer["logits"][0], dtype=np.float32)


serve(lambda arguments: OpenVino(arguments[0], int(arguments[1])))
