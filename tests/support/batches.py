"""Batches of the hot model, whose logits are held against whole rows run without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onnxlm.runtime.engine import Batch
from onnxlm.runtime.sessions import Sessions
from support.parity import assert_logits_close
from support.runtime_models import HOT_CONFIG, at_once, hot_package, loaded

VOCABULARY = int(HOT_CONFIG["vocab_size"])
both = pytest.mark.parametrize("lowering", ["ort", "portable"])


def hot(lowering: str = "ort") -> Sessions:
    return loaded(hot_package(lowering).path).sessions


def some_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in lengths]


def assert_close(ours: NDArray[np.float32], theirs: torch.Tensor) -> None:
    assert_logits_close(torch.from_numpy(ours), theirs)


def assert_behind(ours: NDArray[np.float32], rows: Sequence[Sequence[int]]) -> None:
    """Logits [B, V] are those behind whole rows."""
    assert_close(ours, torch.stack([at_once(row)[-1] for row in rows]))


def prefilled(sessions: Sessions, rows: Sequence[Sequence[int]]) -> Batch:
    batch = Batch(sessions, len(rows))
    batch.prefill_logits(rows)
    return batch
