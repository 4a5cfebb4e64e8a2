"""What `onnxlm inspect` tells of a cache is what graphs return and the runtime allocates, in every family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.exported import CASES, Runner, eager, exported, variants
from support.matrix import cases, is_default

from onnxlm import io_spec
from onnxlm.inspection import KvCache, inspect
from onnxlm.io_spec import StateSpec
from onnxlm.runtime.device_buffers import Device
from onnxlm.runtime.in_place_cache import InPlaceCache

HOST = Device()
TOKENS = 7
KINDS = {
    ("gpt2", "tiny"): "MHA",
    ("falcon", "one KV head, one norm, biases"): "MQA",
    ("llama", "tiny"): "GQA",
    ("mistral", "tiny"): "GQA",
    ("deepseek_v2", "tiny"): "MLA",
}


def told(folder: Path, family: str, variant: str) -> KvCache:
    """Of the config alone."""
    file = folder / "config.json"
    file.write_text(json.dumps(variants(family)[variant]), encoding="utf-8")
    cache = inspect(file, [1, TOKENS]).kv_cache
    assert cache is not None
    return cache


def states(runner: Runner, windows: Sequence[int]) -> list[StateSpec]:
    """As the graphs declare them; the windows of the layers."""
    return [
        StateSpec(
            name,
            io_spec.present_of(name),
            "float32",
            tuple(value.shape),
            "in_place",
            window=windows[int(name.split(".")[1])],
        )
        for name, value in runner.states.items()
    ]


@pytest.mark.parametrize("case", cases([(*case, "ort") for case in CASES], is_default))
def test_what_is_told_is_what_is_held(case: tuple[str, str, str], tmp_path: Path) -> None:
    family, variant, lowering = case
    cache = told(tmp_path, family, variant)
    runner = exported(family, variant, lowering).runner()
    _, present = runner.run([range(TOKENS)], runner.empty())
    assert sum(values.nbytes for values in present.values()) == cache.bytes_at[TOKENS]
    windows = eager(family, variant).windows
    allocated = InPlaceCache(states(runner, windows), 1, 64, HOST)
    allocated.grow(TOKENS, 1)
    held = sum(buffer.numpy().nbytes for buffer in allocated.buffers.values())
    assert held == allocated.capacity * cache.bytes_per_token
    assert allocated.capacity >= TOKENS


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt_oss"])
def test_a_window_ends_what_is_held(family: str, tmp_path: Path) -> None:
    """A prompt of 3,072 tokens in pieces of 256: as told, and as worked out from the family's window."""
    config = variants(family)["tiny"] | {"max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    cache = inspect(tmp_path / "config.json", [1, 3072]).kv_cache
    assert cache is not None
    windows = eager(family).windows
    layer = cache.bytes_per_token // len(windows)
    most = max(windows) - 1 + 64 + 256
    assert cache.bytes_at[3072] == sum(layer * (most if window else 3072) for window in windows)
    allocated = InPlaceCache(
        states(exported(family, "tiny", "ort").runner(), windows), 1, 4096, HOST
    )
    allocated.grow(3072, 256)
    held = sum(buffer.numpy().nbytes for buffer in allocated.buffers.values())
    assert held == allocated.nbytes == cache.bytes_at[3072]


@pytest.mark.parametrize(("family", "variant"), KINDS, ids="-".join)
def test_kinds(family: str, variant: str, tmp_path: Path) -> None:
    assert told(tmp_path, family, variant).attention == KINDS[family, variant]
