"""`LanguageModel`: text or ids in, text, ids and the reason of the end out."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parity import assert_logits_close
from support.runtime_models import (
    ALPHABET,
    COUNTING_CONTEXT,
    END,
    HOT_CONTEXT,
    at_once,
    changed,
    counting_package,
    hot_package,
    loaded,
    wide_package,
)

from onnxlm.errors import InputError
from onnxlm.runtime import Generation, LanguageModel

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


def counting() -> LanguageModel:
    return loaded(counting_package().path)


def hot(lowering: str = "ort") -> LanguageModel:
    return loaded(hot_package(lowering).path)


def ending(config: Any = None, generation: Any = None, tokenizer: Any = None) -> LanguageModel:
    """The counting model whose files call these ids the end of a text; None is null."""
    files = {
        "config.json": {"eos_token_id": config},
        "generation_config.json": {"eos_token_id": generation},
        "tokenizer_config.json": {"eos_token": tokenizer},
    }
    return loaded(changed(counting_package(), files).path)


def test_a_text_and_a_list() -> None:
    one = counting().generate("AB", max_new_tokens=3)
    assert isinstance(one, Generation)
    assert (one.text, one.token_ids, one.finish_reason) == ("CDE", [2, 3, 4], "length")
    assert one.prompt_tokens == 2
    assert one.ttft_s > 0
    assert one.decode_tokens_per_s > 0
    many = counting().generate(["AB", [9], "XYZ", np.array([3, 4])], max_new_tokens=3)
    assert [result.text for result in many] == ["CDE", "KLM", "abc", "FGH"]
    assert [result.prompt_tokens for result in many] == [2, 1, 3, 2]
    assert counting().generate([]) == []


@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_a_batch_gives_what_each_prompt_gives_alone(lowering: str) -> None:
    model, prompts = hot(lowering), ["abc", "Hello, W", "What is it?"]
    together = model.generate(prompts, max_new_tokens=20)
    alone = [model.generate(prompt, max_new_tokens=20) for prompt in prompts]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    for prompt, result in zip(prompts, together, strict=True):
        ids = model.encode(prompt)
        greedy = at_once([*ids, *result.token_ids]).argmax(-1)[len(ids) - 1 : -1].tolist()
        assert result.token_ids == greedy
        assert result.finish_reason == ("eos" if result.token_ids[-1] == END else "length")


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("C", [3, 4, 5]), ("F", [6, 7]), ("H", [8, 9]), ("E", [5])],
    ids=["config", "generation_config", "tokenizer", "first token"],
)
def test_each_file_may_say_what_ends_a_text(prompt: str, ids: list[int]) -> None:
    """5 in config.json, 5 and 7 in generation_config.json, J (9) in tokenizer_config.json."""
    result = ending(5, [5, 7], "J").generate(prompt)
    assert (result.token_ids, result.finish_reason) == (ids, "eos")
    # The letters of these ids are ordinary tokens, but J, which is named as a special one.
    assert result.text == "".join(ALPHABET[i] for i in ids if i != 9)


def test_rows_end_at_different_steps() -> None:
    results = ending(5, [5, 7], "J").generate(["C", "F", "H", "E", "K"], max_new_tokens=4)
    assert [result.token_ids for result in results] == [
        [3, 4, 5],
        [6, 7],
        [8, 9],
        [5],
        [11, 12, 13, 14],
    ]
    assert [result.finish_reason for result in results] == ["eos"] * 4 + ["length"]


def test_null_ends_nothing() -> None:
    result = ending().generate("E")
    assert (len(result.token_ids), result.finish_reason) == (COUNTING_CONTEXT - 1, "context")


@pytest.mark.parametrize("padding", [0, 31])
def test_padding_that_is_the_end_of_a_text(padding: int) -> None:
    """Rows are padded, and what ends a text may be the padding."""
    letter = ALPHABET[padding]
    files = {"tokenizer_config.json": {"eos_token": letter, "pad_token": letter}}
    model = loaded(changed(counting_package(), files).path)
    results = model.generate(["C", "DEFGHIJ", "MNO"], max_new_tokens=5)
    assert [result.text for result in results] == ["DEFGH", "KLMNO", "PQRST"]
    assert model.generate("c", max_new_tokens=30).token_ids[-1] == 31 if padding else True


@pytest.mark.parametrize(
    ("length", "wanted", "made", "reason"),
    [
        (15, 100, 1, "context"),
        (15, 1, 1, "length"),
        (15, 0, 0, "length"),
        (16, 100, 0, "context"),
        (16, 0, 0, "length"),
        (4, 11, 11, "length"),
        (4, 12, 12, "length"),
        (4, 13, 12, "context"),
        (4, None, 12, "context"),
        (4, 0, 0, "length"),
        (4, 1, 1, "length"),
    ],
)
def test_how_many_tokens_fit(length: int, wanted: int | None, made: int, reason: str) -> None:
    """Prompt and answer together fill the 16 positions exactly, and never pass them."""
    prompt = ALPHABET[:length]
    model = counting()
    results = [
        model.generate(prompt, max_new_tokens=wanted),
        *model.generate([prompt, prompt], max_new_tokens=wanted),
    ]
    stream = model.stream(prompt, max_new_tokens=wanted)
    assert "".join(stream) == ALPHABET[length : length + made]
    for result in (*results, stream.result):
        assert result.text == ALPHABET[length : length + made]
        assert (len(result.token_ids), result.finish_reason) == (made, reason)


def test_a_full_prompt_beside_others() -> None:
    results = counting().generate([ALPHABET[:16], "A", ALPHABET[:15]])
    assert [result.text for result in results] == ["", ALPHABET[1:16], "P"]
    assert {result.finish_reason for result in results} == {"context"}


def test_a_prompt_longer_than_the_context() -> None:
    message = (
        "^the prompt is longer than the context; found 17 tokens; allowed: up to 16; shorten it$"
    )
    for prompts in (ALPHABET[:17], ["A", ALPHABET[:17]], [list(range(17))]):
        with pytest.raises(InputError, match=message):
            counting().generate(prompts)
    with pytest.raises(InputError, match=message):
        counting().stream(ALPHABET[:17])
    with pytest.raises(InputError, match=message):
        counting().logits(range(17))


@pytest.mark.parametrize("prompts", ["", [""], ["A", ""], [[]], ["A", []]])
def test_an_empty_prompt(prompts: Any) -> None:
    with pytest.raises(InputError, match=r"^the prompt is empty; give at least one token$"):
        counting().generate(prompts)


def test_no_ids_have_no_logits() -> None:
    with pytest.raises(InputError, match=r"^the prompt is empty"):
        counting().logits([])


@pytest.mark.parametrize("wrong", [-1, 32, 37])
def test_ids_outside_the_vocabulary(wrong: int) -> None:
    message = f"position 2 is outside the vocabulary; found {wrong}; allowed: 0 to 31"
    for call in (
        lambda: counting().generate([[1, 2, wrong]]),
        lambda: counting().generate([[1], [1, 2, wrong]]),
        lambda: counting().stream([1, 2, wrong]),
        lambda: counting().logits([1, 2, wrong]),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_character_that_the_vocabulary_lacks_is_refused_or_left_out() -> None:
    """Never an id past the table."""
    assert counting().encode("A") == [0]
    with pytest.raises(InputError, match="the prompt is empty"):
        counting().encode("é")


@pytest.mark.parametrize("fields", [{"max_new_token": 3}, {"max_new_tokens": -1}, {"top_p": 2}])
def test_a_field_that_makes_no_sense(fields: dict[str, Any]) -> None:
    for call in (counting().generate, counting().stream):
        with pytest.raises(InputError, match=f"generation field '{next(iter(fields))}'"):
            call("A", **fields)


def test_the_package_recommends_and_the_caller_decides() -> None:
    recommended = {"do_sample": True, "temperature": 4.0, "max_new_tokens": 12, "seed": 3}
    model = loaded(changed(hot_package(), {"generation_config.json": recommended}).path)
    drawn = model.generate("Hello")
    assert drawn.token_ids == hot().generate("Hello", **recommended).token_ids
    greedy = model.generate("Hello", do_sample=False)
    assert greedy.token_ids == hot().generate("Hello", max_new_tokens=12).token_ids
    assert greedy.token_ids != drawn.token_ids


def test_a_package_without_recommendations() -> None:
    model = loaded(changed(hot_package(), {"generation_config.json": None}).path)
    assert model.defaults == hot().defaults


def test_logits_behind_every_position() -> None:
    """Of more tokens than run at once."""
    ids = np.random.default_rng(1).integers(0, 100, HOT_CONTEXT).tolist()
    for lowering in ("ort", "portable"):
        logits = hot(lowering).logits(ids)
        assert logits.dtype == np.float32
        assert_logits_close(torch.from_numpy(logits), at_once(ids))


def test_pieces_are_the_text() -> None:
    model = hot()
    stream = model.stream("Hello", max_new_tokens=60, temperature=2.0, seed=4)
    pieces = list(stream)
    assert len(pieces) > 20
    whole = model.generate("Hello", max_new_tokens=60, temperature=2.0, seed=4)
    assert "".join(pieces) == stream.result.text == whole.text
    assert stream.result.token_ids == whole.token_ids


def test_a_stream_tells_how_far_it_is() -> None:
    stream = counting().stream("AB")
    assert (stream.result.text, stream.result.finish_reason) == ("", None)
    assert [next(stream), next(stream)] == ["C", "D"]
    assert (stream.result.text, stream.result.finish_reason) == ("CD", None)
    stream.close()
    assert list(stream) == []
    assert (stream.result.text, stream.result.finish_reason) == ("CD", "cancelled")


def test_a_stream_stopped_from_another_thread_leaves_the_model_as_it_was() -> None:
    model = hot()
    whole = model.generate("Hello", max_new_tokens=30).token_ids
    stop, third = threading.Event(), threading.Event()
    seen: list[str] = []

    def read() -> None:
        for piece in model.stream("Hello", max_new_tokens=30):
            seen.append(piece)
            if len(seen) == 3:
                third.set()
                stop.wait(10)
            if stop.is_set():
                return

    reader = threading.Thread(target=read)
    reader.start()
    assert third.wait(10)
    stop.set()
    reader.join(10)
    assert len(seen) == 3
    assert model.generate("Hello", max_new_tokens=30).token_ids == whole


def test_streams_at_once_do_not_meet() -> None:
    model = hot()
    prompts = ["Hello", "abc", "What?"]
    alone = [model.generate(prompt, max_new_tokens=25).text for prompt in prompts]
    texts = ["", "", ""]
    streams = [model.stream(prompt, max_new_tokens=25) for prompt in prompts]
    for _ in range(26):
        for row, stream in enumerate(streams):
            texts[row] += next(stream, "")
    assert texts == alone


# Runs in a process of its own without torch, whose memory would drown what is measured.
MEMORY = """
import sys
from onnxlm.runtime import load

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

model = load(sys.argv[1], threads=1)
"""

PLATEAU = (
    MEMORY
    + """
sizes = []
for number in range(400):
    length = 1 + number * 89 % 200
    model.generate([[number % 90] * (1 + number % 7)], max_new_tokens=length)
    sizes.append(resident())
print(*sizes)
"""
)

PEAK = (
    MEMORY
    + """
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

before = resident()
result = model.generate([list(range(1, 91)) * 22 + list(range(20))], max_new_tokens=2)
assert result[0].prompt_tokens == 2000 and len(result[0].token_ids) == 2
print(peak() - before)
"""
)


def numbers(program: str, folder: Path) -> list[float]:
    ran = subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True
    )
    return [float(word) for word in ran.stdout.split()]


@LINUX
@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_memory_stays_level_over_300_generations(lowering: str) -> None:
    sizes = numbers(PLATEAU, hot_package(lowering).path)[100:]
    slope = np.polyfit(np.arange(len(sizes)), sizes, 1)[0] * 100
    assert math.isfinite(slope)
    assert slope < 1.0, f"{slope:.2f} MB per 100 generations"
    assert sizes[-1] - sizes[0] < 3.0


@LINUX
def test_a_long_prompt_makes_no_tensor_of_prompt_by_vocabulary() -> None:
    """2,000 tokens by 131,072 would be 1,049 MB."""
    (rise,) = numbers(PEAK, wide_package().path)
    assert 0 < rise < 600, f"{rise:.0f} MB"
