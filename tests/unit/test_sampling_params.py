"""Settings of a generation: bounds by name, what a model recommends, what a caller overrides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from onnxlm.errors import InputError
from onnxlm.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("do_sample", 1, "1"),
        ("temperature", -0.1, "-0.1"),
        ("temperature", math.nan, "nan"),
        ("temperature", math.inf, "inf"),
        ("temperature", "1", "'1'"),
        ("temperature", True, "True"),
        ("top_k", -1, "-1"),
        ("top_k", 1.5, "1.5"),
        ("top_k", True, "True"),
        ("top_p", -1e-9, "-1e-09"),
        ("top_p", 1.01, "1.01"),
        ("top_p", math.nan, "nan"),
        ("seed", -1, "-1"),
        ("seed", 2**64, str(2**64)),
        ("seed", 0.5, "0.5"),
        ("max_new_tokens", -1, "-1"),
        ("max_new_tokens", "10", "'10'"),
    ],
)
def test_bad_fields_are_refused_by_name(field: str, value: Any, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert f"generation field '{field}'; found {shown}; allowed: " in str(caught.value)


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(1))
    assert params.top_k == 3


def test_from_generation_config_takes_its_own_fields() -> None:
    raw = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "eos_token_id": [1, 2],
        "repetition_penalty": 1.0,
        "transformers_version": "4.42.3",
    }
    assert SamplingParams.from_generation_config(raw) == SamplingParams(
        do_sample=True, temperature=0.6, top_k=20
    )
    assert SamplingParams.from_generation_config({}) == SamplingParams()


@pytest.mark.filterwarnings("error")
def test_from_generation_config_says_what_it_does_not_carry_out() -> None:
    SamplingParams.from_generation_config({"repetition_penalty": 1, "num_beams": 1, "min_p": None})
    with pytest.raises(UserWarning, match=r"not carried out: num_beams=4, repetition_penalty=1\.1"):
        SamplingParams.from_generation_config({"repetition_penalty": 1.1, "num_beams": 4})


def test_from_generation_config_refuses_bad_values_by_name() -> None:
    with pytest.raises(InputError, match="'top_k'; found '50'"):
        SamplingParams.from_generation_config({"top_k": "50"})


def test_overrides() -> None:
    base = SamplingParams(temperature=0.6, max_new_tokens=5)
    assert base.with_overrides({"temperature": None, "top_k": None}) == base
    warmer = base.with_overrides({"temperature": 0.9})
    assert (warmer.do_sample, warmer.temperature, warmer.max_new_tokens) == (True, 0.9, 5)
    assert not base.with_overrides({"top_p": 0.5, "do_sample": False}).do_sample
    assert not base.with_overrides({"seed": 3}).do_sample
    with pytest.raises(
        InputError, match="generation field 'min_q'; found 1; allowed: the fields do_sample"
    ):
        base.with_overrides({"min_q": 1})
