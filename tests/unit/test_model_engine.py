"""What `LanguageModel` passes on to the engine: guesses, a budget of bytes, word of long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.batches import assert_close
from support.runtime_models import HOT_CONTEXT, at_once, changed, hot_package, loaded

from onnxlm.errors import InputError
from onnxlm.manifest import QuantizationSpec
from onnxlm.runtime import LanguageModel, engine, load
from onnxlm.runtime.engine import PREFILL_CHUNK, Batch
from onnxlm.runtime.state_buffers import bytes_at

# The letters are tokens, and each prompt says a thing three times.
PROMPTS = ["abcab. abcab. abc", "one two one two one ", "zzzzzz", "the end. The end. "]
DRAWN = {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.05, "seed": 4}


def hot(lowering: str = "ort") -> LanguageModel:
    return loaded(hot_package(lowering).path)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine on which any guess pays; lengths of the calls that ran some."""
    monkeypatch.setattr("onnxlm.runtime.draft_policy.StepCosts.ratio", lambda *_: 0.5)
    calls: list[int] = []
    extend = Batch.extend_logits

    def counted(self: Batch, rows: Any) -> Any:
        calls.append(max(map(len, rows)))
        return extend(self, rows)

    monkeypatch.setattr(Batch, "extend_logits", counted)
    return calls


@pytest.mark.parametrize("fields", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("prompts", [[p] for p in PROMPTS] + [PROMPTS])
def test_guesses_change_no_token(
    eager: list[int], prompts: list[str], fields: dict[str, Any]
) -> None:
    plain = hot().generate(prompts, max_new_tokens=50, **fields)
    assert not eager
    guessed = hot().generate(prompts, max_new_tokens=50, prompt_lookup_num_tokens=5, **fields)
    assert [g.token_ids for g in guessed] == [p.token_ids for p in plain]
    assert [g.finish_reason for g in guessed] == [p.finish_reason for p in plain]
    assert all(2 <= length <= 6 for length in eager)
    if len(prompts) == 1 and not fields:
        assert eager


def test_a_package_whose_guesses_are_run_by_other_weights_is_refused() -> None:
    spec = QuantizationSpec("int8", {"prefill_weights": "own, one scale per row"})
    model = loaded(changed(hot_package(), {}, quantization=spec).path)
    message = (
        r"prompt_lookup_num_tokens: prefill and decode compute .*; found prefill weights own, one scale "
        r"per row; allowed: shared; leave it out, or quantize without --prefill-rows"
    )
    with pytest.raises(InputError, match=message):
        model.generate("abc", prompt_lookup_num_tokens="auto")
    assert model.generate("abc", max_new_tokens=1).token_ids


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "often", "0", True])
def test_numbers_of_guesses_that_make_no_sense(wrong: object) -> None:
    message = (
        r"field 'prompt_lookup_num_tokens'; found .*; allowed: an integer from 1 up, or \"auto\""
    )
    with pytest.raises(InputError, match=message):
        hot().generate("abc", prompt_lookup_num_tokens=wrong)


def test_guesses_are_not_for_beam_search() -> None:
    with pytest.raises(
        InputError, match="prompt_lookup_num_tokens'; found 3; allowed: none in beam"
    ):
        hot().generate("abc", prompt_lookup_num_tokens="3", num_beams=2)


def test_a_chat_guesses_from_earlier_turns(eager: list[int]) -> None:
    """The turns are those of a chat without guesses; the cache holds what was said and no more."""
    plain, guessed = hot().chat(), hot().chat()
    for text in ("abcd abcd abcd", "again: abcd abcd"):
        for _ in plain.send(text, max_new_tokens=40):
            pass
        stream = guessed.send(text, max_new_tokens=40, prompt_lookup_num_tokens=4)
        for _ in stream:
            assert guessed.token_ids == plain.token_ids[: len(guessed.token_ids)]
        assert guessed.messages == plain.messages
        assert guessed.token_ids == plain.token_ids
    assert eager


def test_a_stream_that_is_left_undoes_what_was_guessed(eager: list[int]) -> None:
    model = hot()
    batch, ids = Batch(model.sessions, 1), model.encode("abcab. abcab. abcab.")
    params = model.sampling_params({"prompt_lookup_num_tokens": 6, "max_new_tokens": 60})
    stream = model.stream_after(batch, ids, params)
    for _ in range(20):
        next(stream)
    stream.close()
    assert eager
    assert batch.cache.lengths.tolist() == [len(ids) + len(stream.result.token_ids) - 1]


def test_a_budget_of_bytes() -> None:
    """Room for 300 columns: 290 tokens of a prompt fit, a batch of two such prompts does not."""
    package = hot_package()
    budget = bytes_at(package.manifest.states, 1, 300)
    model = load(package.path, threads=1, kv_budget=f"{budget}B")
    ids = [5, 6] * 145
    assert len(model.generate([ids], max_new_tokens=11)[0].token_ids) == 11
    with pytest.raises(
        InputError, match=rf"301 columns; .*; allowed: {budget:,} bytes \(kv_budget\)"
    ):
        model.generate([ids], max_new_tokens=12)
    with pytest.raises(InputError, match=r"no room for 290 columns; .*run fewer rows"):
        model.generate([ids, ids], max_new_tokens=1)
    with pytest.raises(InputError, match="kv_budget; found 'much'"):
        load(package.path, kv_budget="much")


@pytest.mark.parametrize("fields", [{"num_beams": 4}, {"num_return_sequences": 4, "top_k": 9}])
@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_a_budget_counts_the_rows_to_come(lowering: str, fields: dict[str, Any]) -> None:
    """Beams and draws of one prompt: refused before the prompt has run, not when its row becomes four."""
    package = hot_package(lowering)
    budget = bytes_at(package.manifest.states, 3, 512)
    model = load(package.path, threads=1, kv_budget=budget)
    ids = [5, 6] * 145
    assert len(model.generate(ids, max_new_tokens=2).token_ids) == 2
    batch, few = Batch(model.sessions, 1), {"max_new_tokens": 2}
    with pytest.raises(InputError, match=r"no room for .* columns; .*\(kv_budget\)"):
        list(model.stream_after(batch, ids * 2, model.sampling_params(few | fields)))
    assert batch.lengths.tolist() == [0]
    assert batch.cache.nbytes <= budget
    # The same batch takes one row, and four of a shorter prompt.
    "".join(model.stream_after(batch, ids, model.sampling_params(few)))
    batch.rewind(0)
    "".join(model.stream_after(batch, ids[:100], model.sampling_params(few | fields)))
    assert batch.cache.nbytes <= budget


def test_stop_strings_wait_for_the_least_tokens() -> None:
    plain = hot().generate("abc", max_new_tokens=30).text
    early, late = plain[3:5], plain[11:14]
    made = hot().generate("abc", max_new_tokens=30, stop_strings=[early, late], min_new_tokens=9)
    assert (made.text, made.finish_reason) == (plain[:11], "stop")
    made = hot().generate("abc", max_new_tokens=30, stop_strings=[early, late], min_length=12)
    assert (made.text, made.finish_reason) == (plain[:11], "stop")


def test_long_prompts_tell_how_far_they_are() -> None:
    told: list[tuple[str, int, int]] = []
    model = load(hot_package().path, threads=1)
    model.progress = lambda *word: told.append(word)
    model.generate([[7] * PREFILL_CHUNK, [8] * 3], max_new_tokens=1)
    assert told == []
    length = PREFILL_CHUNK + 100
    assert length < HOT_CONTEXT
    model.generate([[7] * length, [8] * 3], max_new_tokens=1)
    assert told == [("prompt", PREFILL_CHUNK, length), ("prompt", length, length)]


@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_logits_of_a_long_row_come_in_calls_as_long_as_a_prompts(
    monkeypatch: pytest.MonkeyPatch, lowering: str
) -> None:
    model, ids = hot(lowering), [5 + i % 60 for i in range(PREFILL_CHUNK + 140)]
    sizes: list[int] = []
    run = Batch.prefill_all_logits

    def counted(self: Batch, part: Sequence[int]) -> Any:
        sizes.append(len(part))
        return run(self, part)

    monkeypatch.setattr(Batch, "prefill_all_logits", counted)
    monkeypatch.setattr(engine, "_CALL_SCORES", 50_000)
    assert_close(model.logits(ids), at_once(ids))
    assert len(sizes) > 2
    assert sizes[0] > sizes[1]
    assert sum(sizes) == len(ids)
