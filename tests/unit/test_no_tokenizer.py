"""Packages without tokenizer.json: ids in, the ids that the same package gives with one, and no text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.runtime_models import changed, counting_package, hot_package, loaded

from onnxlm.errors import InputError
from onnxlm.package import Package
from onnxlm.runtime import LanguageModel

NO_TEXT = r"the package has no tokenizer\.json: its tokens have no text.*--ids"


def bare_package(package: Package) -> Package:
    return changed(package, {"tokenizer.json": None, "tokenizer_config.json": None})


@pytest.fixture(scope="module")
def bare() -> LanguageModel:
    return loaded(bare_package(counting_package()).path)


@pytest.mark.parametrize("prompt", [[0, 1], (0, 1)])
def test_ids_in_and_out(bare: LanguageModel, prompt: Any) -> None:
    one = bare.generate(prompt, max_new_tokens=3)
    assert (one.token_ids, one.decoded, one.finish_reason) == ([2, 3, 4], None, "length")
    with pytest.raises(InputError, match=NO_TEXT):
        _ = one.text


def test_a_batch_draws_and_beams_give_the_ids_that_they_give_with_a_tokenizer() -> None:
    package = hot_package()
    model, bare = loaded(package.path), loaded(bare_package(package).path)
    prompts = [[1, 2, 3], [4], [5, 6]]
    for fields in (
        {"do_sample": True, "temperature": 1.5, "seed": 7, "logprobs": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"stop_token_ids": [3, 4, 5]},
    ):
        asked = {"max_new_tokens": 8, "eos_token_id": [0], **fields}
        for one, other in zip(
            model.generate(prompts, **asked), bare.generate(prompts, **asked), strict=True
        ):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
            assert [a.token_ids for a in one.alternatives] == [
                a.token_ids for a in other.alternatives
            ]


def test_a_stream_has_no_pieces_and_a_result(bare: LanguageModel) -> None:
    stream = bare.stream([0, 1], max_new_tokens=3)
    assert "".join(stream) == ""
    assert stream.result.token_ids == [2, 3, 4]
    beams = bare.stream([0, 1], max_new_tokens=3, num_beams=2)
    assert list(beams) == []
    assert len(beams.result.token_ids) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.generate("AB"),
        lambda model: model.stream("AB"),
        lambda model: model.encode("AB"),
        lambda model: model.tokenizer.decode([1]),
    ],
)
def test_text_is_refused_in_one_line(
    bare: LanguageModel, call: Callable[[LanguageModel], object]
) -> None:
    with pytest.raises(InputError, match=NO_TEXT):
        call(bare)


def test_stop_strings_are_refused(bare: LanguageModel) -> None:
    with pytest.raises(
        InputError, match=r"stop_strings: the package has no tokenizer\.json.*stop_t"
    ):
        bare.generate([0, 1], stop_strings="x")


def test_ids_outside_are_refused(bare: LanguageModel) -> None:
    with pytest.raises(InputError, match="token id at position 1 is outside"):
        bare.generate([0, 32])


def test_one_flat_list_is_one_prompt_with_a_tokenizer_too() -> None:
    model = loaded(counting_package().path)
    one = model.generate([0, 1], max_new_tokens=2)
    assert (one.text, one.token_ids) == ("CD", [2, 3])
    (same,) = model.generate([[0, 1]], max_new_tokens=2)
    assert same.token_ids == [2, 3]
