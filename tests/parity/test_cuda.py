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
from support.hot_packages import new_folder
from support.parity import assert_logits_close
from support.runtime_models import at_once, hot_package, loaded, windowed_package

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


@functools.cache
def folder(precision: str) -> Path:
    """The hot model in one precision."""
    source = hot_package()
    if precision == "fp32":
        return source.path
    out = new_folder() / "model"
    if precision == "fp16":
        return export(source.path, out, precision=precision).path
    return quantize(source.path, out, scheme=precision).path


@functools.cache
def on_device(precision: str = "fp32", **session: Any) -> LanguageModel:
    return load(folder(precision), provider=CUDA, **session)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_position_of_a_prompt_and_every_step(precision: str) -> None:
    (ids,) = some_ids(LONG + STEPS)
    expected = at_once(ids)
    bound = PARITY[precision].bound
    batch = Batch(on_device(precision).sessions, 1)
    prompt = torch.from_numpy(batch.prefill_all_logits(ids[:LONG]))
    assert_logits_close(prompt, expected[:LONG], bound)
    for position in range(LONG, LONG + STEPS):
        batch.set_tokens([ids[position]])
        step = torch.from_numpy(batch.decode_logits().copy())
        assert_logits_close(step, expected[position : position + 1], bound)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_logits_are_the_processors(precision: str) -> None:
    """Both round activations where they like: as close as two roundings of 8 bits."""
    (ids,) = some_ids(64)
    theirs = torch.from_numpy(loaded(folder(precision)).logits(ids))
    assert_logits_close(torch.from_numpy(on_device(precision).logits(ids)), theirs, bound=0.2)


@pytest.mark.parametrize("capture", [False, True], ids=["launched", "recorded"])
def test_greedy_tokens_across_growths_of_the_cache(capture: bool) -> None:
    """A recorded step reads where the cache was: it is recorded anew when buffers grow."""
    (ids,) = some_ids(20)
    settings = {"max_new_tokens": LONG, "eos_token_id": [0]}
    model = on_device(graph_capture=True) if capture else on_device()
    assert (
        model.generate(ids, **settings).token_ids
        == loaded(folder("fp32")).generate(ids, **settings).token_ids
    )


def test_rows_of_different_lengths_rewound_and_reordered() -> None:
    rows = some_ids(5, 21, 64)
    batch = Batch(on_device().sessions, len(rows))
    batch.prefill_tokens(rows)
    batch.rewind(np.array([4, 11, 50]))
    batch.reorder(np.array([2, 0]))
    kept = [rows[2][:50], rows[0][:4]]
    new = some_ids(7, 3, seed=1)
    ours = batch.prefill_logits(new)
    for row, (old, more) in enumerate(zip(kept, new, strict=True)):
        assert_logits_close(torch.from_numpy(ours[row : row + 1]), at_once([*old, *more])[-1:])


def test_caches_of_a_window_lose_tokens() -> None:
    source = windowed_package().path
    (ids,) = some_ids(LONG)
    settings = {"max_new_tokens": LONG, "eos_token_id": [0]}
    model = load(source, provider=CUDA)
    assert (
        model.generate(ids, **settings).token_ids
        == loaded(source).generate(ids, **settings).token_ids
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_nothing_heavy_is_left_to_the_processor(precision: str) -> None:
    package = on_device(precision).package
    for placement in package_placement(package, SessionConfig(provider=CUDA)).values():
        left = placement.counts.get("CPUExecutionProvider", {})
        assert not HEAVY & left.keys()


def test_no_such_device() -> None:
    with pytest.raises(OnnxlmError, match="has no such device; found 99; allowed: 0"):
        load(folder("fp32"), provider=CUDA, device_id=99)


def test_too_little_memory() -> None:
    with pytest.raises(OnnxlmError, match="too little memory for this"):
        load(folder("fp32"), provider=CUDA, gpu_mem_limit=1 << 16).generate([5] * LONG)
