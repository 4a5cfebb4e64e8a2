"""LongRoPE on both sides of its switch: a row's length chooses the frequencies of all of its positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.exported import Runner, exported, variants
from support.hot import hot_model, oracle_logits, save_folder
from support.parity import assert_logits_close
from torch import Tensor

from onnxlm.export.lowerings import lowering_names
from onnxlm.models import load
from onnxlm.models.registry import find_architecture

FAMILY = "phi3"
VARIANT = next(name for name in variants(FAMILY) if "longrope" in name)
SWITCH = 64
TOKENS = [(37 * position + 11) % 89 for position in range(128)]


@pytest.fixture(params=lowering_names())
def runner(request: pytest.FixtureRequest) -> Runner:
    return exported(FAMILY, VARIANT, request.param).runner()


def whole(length: int) -> Tensor:
    return exported(FAMILY, VARIANT, lowering_names()[0]).oracle_logits(TOKENS[:length])


@pytest.mark.parametrize("length", [8, SWITCH - 1, SWITCH, SWITCH + 1, 128])
def test_one_call(runner: Runner, length: int) -> None:
    logits, _ = runner.run([TOKENS[:length]], runner.empty(), keep=length)
    assert_logits_close(logits[0], whole(length))


def test_decode_behind_a_long_prompt(runner: Runner) -> None:
    expected = whole(80)
    logits, past = runner.run([TOKENS[: SWITCH + 1]], runner.empty())
    for position in range(SWITCH + 1, 80):
        assert_logits_close(logits[0], expected[position - 1 : position])
        logits, past = runner.step([TOKENS[position]], past)
    assert_logits_close(logits[0], expected[-1:])


def test_each_row_of_a_batch_by_its_own_length(runner: Runner) -> None:
    """transformers goes by the longest row of a batch; here a row is what it is alone."""
    long, short = TOKENS[:70], TOKENS[30:40]
    mask = torch.tensor([[1] * 70, [1] * 10 + [0] * 60])
    logits, past = runner.run([long, short + [0] * 60], runner.empty(2), mask)
    case = exported(FAMILY, VARIANT, lowering_names()[0])
    assert_logits_close(logits[0], case.oracle_logits(long)[-1:])
    assert_logits_close(logits[1], case.oracle_logits(short)[-1:])
    mask = torch.cat((mask, torch.ones((2, 1), dtype=torch.int64)), dim=1)
    logits, _ = runner.step([5, 6], past, mask)
    assert_logits_close(logits[0], case.oracle_logits([*long, 5])[-1:])
    assert_logits_close(logits[1], case.oracle_logits([*short, 6])[-1:])


def cached_steps(prompt: int, length: int) -> Iterator[Tensor]:
    """transformers' model behind its own cache, without the fresh start that its `generate` makes."""
    model = hot_model(variants(FAMILY)[VARIANT])
    cache, start = None, 0
    for end in range(prompt, length + 1):
        with torch.no_grad():
            ids = torch.tensor([TOKENS[start:end]])
            result = model(ids, past_key_values=cache, use_cache=True)
        cache, start = result.past_key_values, end
        yield result.logits[0, -1:]


def test_decode_across_the_switch_keeps_the_keys_that_are_cached(runner: Runner) -> None:
    """As transformers' cache does: keys stay as they were turned, new ones are turned the long way."""
    steps = cached_steps(SWITCH - 2, SWITCH + 4)
    logits, past = runner.run([TOKENS[: SWITCH - 2]], runner.empty())
    assert_logits_close(logits[0], next(steps))
    for position in range(SWITCH - 2, SWITCH + 4):
        logits, past = runner.step([TOKENS[position]], past)
        assert_logits_close(logits[0], next(steps))
    anew = whole(SWITCH + 4)[-1:]
    assert (logits[0] - anew).abs().max() > 0.1, "the switch is too small to be seen"


@pytest.mark.parametrize("length", [16, 17, 60])
def test_llama_has_it_too(tmp_path: Any, length: int) -> None:
    config = {
        **find_architecture("llama").tiny,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "original_max_position_embeddings": 16,
            "factor": 4.0,
            "short_factor": [1.0 + 0.1 * i for i in range(16)],
            "long_factor": [1.0 + i for i in range(16)],
        },
    }
    oracle = hot_model(config)
    model = load(save_folder(oracle, tmp_path))
    assert_logits_close(model.logits(TOKENS[:length]), oracle_logits(oracle, TOKENS[:length]))
