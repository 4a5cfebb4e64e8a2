"""Packages on a CUDA device: against transformers, and against the same package on the processor.

What needs no device (options, plans of buffers, errors) is tested with stand-ins in `tests/unit`. These need
one, and say why they are skipped where there is none. None has been run on a device yet.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import some_ids
from support.hot import oracle_logits
from support.hot_packages import new_folder
from support.parity import assert_logits_close
from support.runtime_models import (
    at_once,
    hot_package,
    loaded,
    windowed_oracle,
    windowed_package,
)

from onnxlm.errors import OnnxlmError
from onnxlm.export import export
from onnxlm.quantize import quantize
from onnxlm.runtime import LanguageModel, load
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.placement import package_placement
from onnxlm.runtime.providers import find_provider
from onnxlm.runtime.session import HEAVY, SessionConfig
from onnxlm.tolerances import PARITY

CUDA = "cuda"
MISSING = find_provider(CUDA).unavailable()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(MISSING is not None, reason=f"no CUDA device: {MISSING}"),
]
# Longer than a growth of the cache, and than a chunk of a prompt.
LONG, STEPS = 300, 40


FULL = ("fp16", "ort"), ("fp16", "portable"), ("fp32", "portable")
QUANTIZED = "int8", "int4"
of_full_precision = pytest.mark.parametrize(("precision", "lowering"), FULL)


@functools.cache
def folder(precision: str, lowering: str = "ort") -> Path:
    """The hot model in one precision; 8 and 4 bits are made of fp16."""
    if precision in QUANTIZED:
        return quantized_from_fp16(precision, lowering)
    if precision == "fp32":
        return hot_package(lowering).path
    out = new_folder() / "model"
    return export(hot_package().path, out, precision=precision, lowering=lowering).path


def quantized_from_fp16(scheme: str, lowering: str) -> Path:
    """Activations and caches stay fp16: CUDA's attention of lowering ort takes no others."""
    return quantize(folder("fp16", lowering), new_folder() / "model", scheme=scheme).path


@functools.cache
def on_device(precision: str, lowering: str = "ort", **session: Any) -> LanguageModel:
    return load(folder(precision, lowering), provider=CUDA, **session)


@of_full_precision
def test_every_position_of_a_prompt_and_every_step(precision: str, lowering: str) -> None:
    (ids,) = some_ids(LONG + STEPS)
    expected = at_once(ids)
    bound = PARITY[precision].bound
    batch = Batch(on_device(precision, lowering).sessions, 1)
    prompt = torch.from_numpy(batch.prefill_all_logits(ids[:LONG]))
    assert_logits_close(prompt, expected[:LONG], bound)
    for position in range(LONG, LONG + STEPS):
        batch.set_tokens([ids[position]])
        step = torch.from_numpy(batch.decode_logits().copy())
        assert_logits_close(step, expected[position : position + 1], bound)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_quantized_logits_are_the_processors(precision: str) -> None:
    """Both round activations where they like: as close as two roundings of 8 bits."""
    (ids,) = some_ids(64)
    theirs = torch.from_numpy(loaded(folder(precision)).logits(ids))
    assert_logits_close(torch.from_numpy(on_device(precision).logits(ids)), theirs, bound=0.2)


def test_greedy_tokens_across_growths_of_the_cache() -> None:
    """In fp32: in fewer bits two devices may choose another of two close tokens."""
    (ids,) = some_ids(20)
    settings: dict[str, Any] = {"max_new_tokens": LONG, "eos_token_id": [0]}
    ours = on_device("fp32", "portable").generate(ids, **settings)
    assert ours.token_ids == loaded(folder("fp32")).generate(ids, **settings).token_ids


def test_recorded_steps_are_the_launched_ones() -> None:
    """A recorded step reads where the cache was: it is recorded anew when buffers grow."""
    (ids,) = some_ids(20)
    settings: dict[str, Any] = {"max_new_tokens": LONG, "eos_token_id": [0]}
    recorded = on_device("fp16", graph_capture=True).generate(ids, **settings)
    assert recorded.token_ids == on_device("fp16").generate(ids, **settings).token_ids


@of_full_precision
def test_rows_of_different_lengths_rewound_and_reordered(precision: str, lowering: str) -> None:
    rows = some_ids(5, 21, 64)
    batch = Batch(on_device(precision, lowering).sessions, len(rows))
    batch.prefill_tokens(rows)
    batch.rewind(np.array([4, 11, 50]))
    batch.reorder(np.array([2, 0]))
    kept = [rows[2][:50], rows[0][:4]]
    new = some_ids(7, 3, seed=1)
    ours = batch.prefill_logits(new)
    bound = PARITY[precision].bound
    for row, (old, more) in enumerate(zip(kept, new, strict=True)):
        theirs = at_once([*old, *more])[-1:]
        assert_logits_close(torch.from_numpy(ours[row : row + 1]), theirs, bound)


def test_caches_of_a_window_lose_tokens() -> None:
    path = export(windowed_package().path, new_folder() / "model", precision="fp16").path
    (ids,) = some_ids(LONG + STEPS)
    batch = Batch(load(path, provider=CUDA).sessions, 1)
    batch.prefill_logits([ids[:LONG]])
    for token in ids[LONG:]:
        batch.set_tokens([token])
        logits = batch.decode_logits().copy()
    theirs = oracle_logits(windowed_oracle(), ids)[-1:]
    assert_logits_close(torch.from_numpy(logits), theirs, PARITY["fp16"].bound)


@pytest.mark.parametrize(
    ("precision", "lowering"), [*FULL, *((precision, "ort") for precision in QUANTIZED)]
)
def test_nothing_heavy_is_left_to_the_processor(precision: str, lowering: str) -> None:
    package = on_device(precision, lowering).package
    for placement in package_placement(package, SessionConfig(provider=CUDA)).values():
        left = placement.counts.get("CPUExecutionProvider", {})
        assert not HEAVY & left.keys()


def test_no_such_device() -> None:
    with pytest.raises(OnnxlmError, match="has no such device; found 99; allowed: 0"):
        load(folder("fp16"), provider=CUDA, device_id=99)


def test_too_little_memory() -> None:
    with pytest.raises(OnnxlmError, match="too little memory for this"):
        load(folder("fp16"), provider=CUDA, gpu_mem_limit=1 << 16).generate([5] * LONG)
