"""What `onnxlm inspect` tells of a cache is what graphs return and the runtime allocates, in every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.exported import CASES, Runner, exported, variants
from support.matrix import cases, is_default

from onnxlm import io_spec
from onnxlm.inspection import KvCache, inspect
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.in_place_cache import InPlaceCache

TOKENS = 7
KINDS = {
    ("gpt2", "tiny"): "MHA",
    ("falcon", "one KV head, one norm, biases"): "MQA",
    ("llama", "tiny"): "GQA",
    ("mistral", "tiny"): "GQA",  # all layers with a window: columns before it are kept
    ("deepseek_v2", "tiny"): "MLA",
}


def told(folder: Path, family: str, variant: str) -> KvCache:
    """Of the config alone."""
    file = folder / "config.json"
    file.write_text(json.dumps(variants(family)[variant]), encoding="utf-8")
    cache = inspect(file, [1, TOKENS]).kv_cache
    assert cache is not None
    return cache


def states(runner: Runner) -> list[StateSpec]:
    """As the graphs declare them."""
    return [
        StateSpec(name, io_spec.present_of(name), "float32", tuple(value.shape), "in_place")
        for name, value in runner.states.items()
    ]


@pytest.mark.parametrize("case", cases([(*case, "ort") for case in CASES], is_default))
def test_what_is_told_is_what_is_held(case: tuple[str, str, str], tmp_path: Path) -> None:
    family, variant, lowering = case
    cache = told(tmp_path, family, variant)
    runner = exported(family, variant, lowering).runner()
    _, present = runner.run([range(TOKENS)], runner.empty())
    assert sum(values.nbytes for values in present.values()) == cache.bytes_at[TOKENS]
    allocated = InPlaceCache(states(runner), 1, 64, ("cpu", 0))
    allocated.grow(TOKENS)
    held = sum(buffer.numpy().nbytes for buffer in allocated.buffers.values())
    assert held == allocated.capacity * cache.bytes_per_token
    assert allocated.capacity >= TOKENS


@pytest.mark.parametrize(("family", "variant"), KINDS, ids="-".join)
def test_kinds(family: str, variant: str, tmp_path: Path) -> None:
    assert told(tmp_path, family, variant).attention == KINDS[family, variant]
