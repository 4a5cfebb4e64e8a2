"""Settings of a generation: bounds by name, what a model recommends, what a caller overrides."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from onnxlm.errors import InputError
from onnxlm.runtime.sampling_params import SamplingParams, params_of_rows


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
        ("min_p", 1.1, "1.1"),
        ("typical_p", 0, "0"),
        ("typical_p", -1, "-1"),
        ("repetition_penalty", 0, "0"),
        ("repetition_penalty", math.inf, "inf"),
        ("presence_penalty", "1", "'1'"),
        ("frequency_penalty", math.nan, "nan"),
        ("no_repeat_ngram_size", -1, "-1"),
        ("no_repeat_ngram_size", 2.0, "2.0"),
        ("bad_words_ids", [3], "[3]"),
        ("bad_words_ids", [[]], "[[]]"),
        ("bad_words_ids", [[-1]], "[[-1]]"),
        ("bad_words_ids", "ab", "'ab'"),
        ("suppress_tokens", [1, "2"], "[1, '2']"),
        ("suppress_tokens", [True], "[True]"),
        ("begin_suppress_tokens", -1, "-1"),
        ("sequence_bias", [[[1], math.nan]], "[[[1], nan]]"),
        ("sequence_bias", [[[], 1.0]], "[[[], 1.0]]"),
        ("sequence_bias", [[1, 1.0]], "[[1, 1.0]]"),
        ("sequence_bias", 5, "5"),
        ("logit_bias", {"x": 1.0}, "{'x': 1.0}"),
        ("logit_bias", {1: math.inf}, "{1: inf}"),
        ("logit_bias", 3, "3"),
        ("min_new_tokens", -1, "-1"),
        ("min_length", 1.5, "1.5"),
        ("eos_token_id", "2", "'2'"),
        ("stop_strings", "", "''"),
        ("stop_strings", ["a", ""], "['a', '']"),
        ("stop_strings", 3, "3"),
        ("stop_token_ids", [[1]], "[[1]]"),
        ("logprobs", -1, "-1"),
        ("logprobs", True, "True"),
        ("num_beams", 0, "0"),
        ("num_return_sequences", 0, "0"),
        ("length_penalty", math.inf, "inf"),
        ("early_stopping", "always", "'always'"),
        ("early_stopping", 1, "1"),
    ],
)
def test_bad_fields_are_refused_by_name(field: str, value: Any, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert f"generation field '{field}'; found {shown}; allowed: " in str(caught.value)


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(1))
    assert params.top_k == 3


def test_values_have_one_form() -> None:
    assert SamplingParams(suppress_tokens=[3, 1, 3]).suppress_tokens == (1, 3)
    assert SamplingParams(stop_token_ids=4).stop_token_ids == (4,)
    assert SamplingParams(stop_strings="END").stop_strings == ("END",)
    biases = SamplingParams(sequence_bias=[[[1, 2], -1], [[3], 2.5], [[1, 2], 4]]).sequence_bias
    assert biases == (((1, 2), 4.0), ((3,), 2.5))
    assert SamplingParams(sequence_bias={(1, 2): 4.0, (3,): 2.5}).sequence_bias == biases
    assert SamplingParams(logit_bias={"7": 1, 8: -2.0}).logit_bias == ((7, 1.0), (8, -2.0))
    assert SamplingParams(logit_bias={7: -math.inf}).logit_bias == ((7, -math.inf),)
    hash(SamplingParams(bad_words_ids=[[1], [2, 3]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 2, "do_sample": True}, "'num_beams'; found 2; allowed: 1 where tokens are"),
        ({"num_beams": 2, "stop_strings": ["a"]}, "'stop_strings'; found ['a']; allowed: none in"),
        (
            {"num_return_sequences": 2},
            "'num_return_sequences'; found 2; allowed: up to num_beams (1)",
        ),
        ({"num_beams": 3, "num_return_sequences": 4}, "allowed: up to num_beams (3)"),
        (
            {"do_sample": True, "temperature": 0, "num_return_sequences": 2},
            "'num_return_sequences'; found 2",
        ),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        SamplingParams(**fields)


def test_from_generation_config_takes_its_own_fields() -> None:
    raw = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "eos_token_id": [1, 2],
        "repetition_penalty": 1.1,
        "suppress_tokens": [5, 6],
        "transformers_version": "4.42.3",
    }
    assert SamplingParams.from_generation_config(raw) == SamplingParams(
        do_sample=True,
        temperature=0.6,
        top_k=20,
        repetition_penalty=1.1,
        suppress_tokens=[5, 6],
    )
    assert SamplingParams.from_generation_config({}) == SamplingParams()


@pytest.mark.filterwarnings("error")
def test_what_transformers_writes_by_default_is_carried_out() -> None:
    from transformers import GenerationConfig

    assert SamplingParams.from_generation_config(GenerationConfig().to_dict()) == SamplingParams()


@pytest.mark.filterwarnings("error")
def test_from_generation_config_says_what_it_does_not_carry_out() -> None:
    SamplingParams.from_generation_config({"guidance_scale": 1, "epsilon_cutoff": 0, "top_h": None})
    with pytest.raises(UserWarning, match=r"not carried out: guidance_scale=2\.0, top_h=0\.4"):
        SamplingParams.from_generation_config({"top_h": 0.4, "guidance_scale": 2.0})
    with pytest.raises(UserWarning, match=r"not carried out: num_beams=4"):
        SamplingParams.from_generation_config({"do_sample": True, "num_beams": 4})


def test_from_generation_config_refuses_bad_values_by_name() -> None:
    with pytest.raises(InputError, match="'top_k'; found '50'"):
        SamplingParams.from_generation_config({"top_k": "50"})


def test_overrides() -> None:
    base = SamplingParams(temperature=0.6, max_new_tokens=5)
    assert base.with_overrides({"temperature": None, "top_k": None}) == base
    for asked in ({"temperature": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}):
        warmer = base.with_overrides(asked)
        assert (warmer.do_sample, warmer.max_new_tokens) == (True, 5)
    assert not base.with_overrides({"top_p": 0.5, "do_sample": False}).do_sample
    assert not base.with_overrides({"seed": 3}).do_sample
    with pytest.raises(
        InputError, match="generation field 'min_q'; found 1; allowed: the fields do_sample"
    ):
        base.with_overrides({"min_q": 1})


def test_beams_and_draws_exclude_each_other() -> None:
    drawn = SamplingParams(do_sample=True, num_return_sequences=3)
    beams = drawn.with_overrides({"num_beams": 4})
    assert (beams.do_sample, beams.num_beams, beams.num_return_sequences) == (False, 4, 1)
    assert drawn.with_overrides({"num_beams": 1}).do_sample
    again = beams.with_overrides({"temperature": 0.5})
    assert (again.do_sample, again.num_beams) == (True, 1)
    with pytest.raises(InputError, match="'num_beams'; found 4"):
        beams.with_overrides({"temperature": 0.5, "num_beams": 4})


# A value for each row


@pytest.mark.parametrize(
    ("name", "value", "rows"),
    [
        ("temperature", 0.5, [0.5, 0.5]),
        ("temperature", [0, 0.8], [0.0, 0.8]),
        ("temperature", (0.5, None), [0.5, 1.0]),
        ("temperature", np.array([0.25, 0.5]), [0.25, 0.5]),
        ("suppress_tokens", [1, 2], [(1, 2), (1, 2)]),
        ("suppress_tokens", [[1, 2], []], [(1, 2), ()]),
        ("suppress_tokens", [None, [3]], [(), (3,)]),
        ("stop_strings", ["a", "b"], [("a", "b")] * 2),
        ("stop_strings", [["a"], ["b", "c"]], [("a",), ("b", "c")]),
        ("bad_words_ids", [[1], [2, 3]], [((1,), (2, 3))] * 2),
        ("bad_words_ids", [[[1]], [[2, 3], [4]]], [((1,),), ((2, 3), (4,))]),
        ("bad_words_ids", [], [(), ()]),
        ("sequence_bias", [[[1], 2.0]], [(((1,), 2.0),)] * 2),
        ("sequence_bias", [{(1,): 2.0}, None], [(((1,), 2.0),), ()]),
        ("sequence_bias", [[[[1], 2.0]], [[[3], 4.0]]], [(((1,), 2.0),), (((3,), 4.0),)]),
        ("logit_bias", [{1: 2.0}, {3: 4.0}], [((1, 2.0),), ((3, 4.0),)]),
        ("eos_token_id", [5, 7], [(5, 7), (5, 7)]),
        ("eos_token_id", [[5], [7, 9]], [(5,), (7, 9)]),
        ("early_stopping", [True, "never"], [True, "never"]),
    ],
)
def test_a_list_one_deeper_than_a_value_has_a_value_for_each_row(
    name: str, value: Any, rows: list[Any]
) -> None:
    params = params_of_rows(SamplingParams(), {name: value}, 2)
    assert [getattr(one, name) for one in params] == rows


def test_a_list_as_long_as_the_batch() -> None:
    with pytest.raises(
        InputError, match=r"'top_k'; found \[1, 2, 3\]; .*a list of 2: one for each"
    ):
        params_of_rows(SamplingParams(), {"top_k": [1, 2, 3]}, 2)
    with pytest.raises(InputError, match="'temperature'; found -1; allowed"):
        params_of_rows(SamplingParams(), {"temperature": [0.5, -1]}, 2)


def test_seeds_of_rows() -> None:
    def seeds(fields: dict[str, Any], rows: int) -> list[int | None]:
        return [one.seed for one in params_of_rows(SamplingParams(), fields, rows)]

    assert seeds({}, 2) == [None, None]
    assert seeds({"seed": 40}, 3) == [40, 41, 42]
    assert seeds({"seed": 2**64 - 1}, 2) == [2**64 - 1, 0]
    assert seeds({"seed": [40, 40, None]}, 3) == [40, 40, None]
    assert seeds({"seed": np.array([40, 7])}, 2) == [40, 7]
    drawn = {"do_sample": True, "num_return_sequences": 3}
    assert seeds({"seed": 40} | drawn, 3) == [40, 43, 46]
    own = SamplingParams(seed=7)
    assert [one.seed for one in params_of_rows(own, {}, 3)] == [7, 8, 9]
