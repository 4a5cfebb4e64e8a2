"""A generation ends within one step of being told to, by any thread or task, and leaves all in order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.chats import rendered
from support.runtime_models import HOT_CONTEXT, at_once, hot_package, loaded

from onnxlm.runtime import LanguageModel, TextIterator, engine
from onnxlm.runtime.engine import PREFILL_CHUNK, Batch

PROMPT = "Hello"


def hot(lowering: str = "ort") -> LanguageModel:
    return loaded(hot_package(lowering).path)


@pytest.fixture(scope="module")
def whole() -> list[int]:
    """Greedy ids behind the prompt, each from transformers over all before it."""
    ids = hot().encode(PROMPT)
    start = len(ids)
    for _ in range(30):
        ids.append(int(at_once(ids)[-1].argmax()))
    return ids[start:]


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Do something in the middle of a decode step, counted from 1."""
    step, count = Batch.decode_tokens, iter(range(1, 10_000))

    def counted(self: Batch, live: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        if next(count) == number:
            act()
        return step(self, live)

    monkeypatch.setattr(Batch, "decode_tokens", counted)


def assert_fresh(model: LanguageModel, whole: list[int]) -> None:
    """The same prompt gives what it gives a model that nobody has used."""
    assert model.generate(PROMPT, max_new_tokens=30).token_ids == whole


@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_by_another_thread_at_step_3(
    lowering: str, whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hot(lowering)
    reached, cancelled = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert cancelled.wait(30)

    at_step(monkeypatch, 3, wait)
    stream = model.stream(PROMPT, max_new_tokens=30)
    pieces: list[str] = []
    reader = threading.Thread(target=lambda: pieces.extend(stream))
    reader.start()
    assert reached.wait(30)
    stream.cancel()
    cancelled.set()
    reader.join(30)
    # The prompt gives the first token; the step that ran when it was cancelled is the last.
    assert stream.result.token_ids == whole[:4]
    assert "".join(pieces) == stream.result.text
    assert stream.result.finish_reason == "cancelled"
    assert_fresh(model, whole)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.5, "seed": 3}])
def test_between_two_pieces_no_step_runs_any_more(fields: dict[str, float]) -> None:
    stream = hot().stream(PROMPT, max_new_tokens=30, **fields)
    pieces = [next(stream), next(stream)]
    made = list(stream.result.token_ids)
    stream.cancel()
    pieces += stream
    assert stream.result.token_ids == made
    assert ("".join(pieces), stream.result.finish_reason) == (stream.result.text, "cancelled")


def test_text_that_is_held_comes_with_the_end(
    whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that give no text a reader sees nothing, and yet they end."""
    model = hot()
    monkeypatch.setattr(model.tokenizer, "piece", lambda *_: None)
    stream = model.stream(PROMPT, max_new_tokens=30)
    at_step(monkeypatch, 5, stream.cancel)
    assert list(stream) == []
    assert stream.result.token_ids == whole[:6]


def test_before_the_first_step_and_after_the_last(whole: list[int]) -> None:
    model = hot()
    stream = model.stream(PROMPT, max_new_tokens=30)
    stream.cancel()
    assert list(stream) == []
    assert (stream.result.token_ids, stream.result.finish_reason) == ([], "cancelled")
    stream = model.stream(PROMPT, max_new_tokens=30)
    assert "".join(stream) == stream.result.text
    reason = stream.result.finish_reason
    assert reason != "cancelled"
    stream.cancel()
    stream.close()
    assert (stream.result.token_ids, stream.result.finish_reason) == (whole, reason)


def test_close_waits_for_the_step_of_another_thread(
    whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who closes may use the cache next."""
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(30)

    at_step(monkeypatch, 2, wait)
    stream = hot().stream(PROMPT, max_new_tokens=30)
    reader = threading.Thread(target=lambda: list(stream))
    closer = threading.Thread(target=stream.close)
    reader.start()
    assert reached.wait(30)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    closer.join(30)
    reader.join(30)
    assert not closer.is_alive()
    assert stream.result.token_ids == whole[:3]
    assert list(stream) == []


def test_a_long_prompt_ends_behind_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hot()
    chat = model.chat()
    run = engine.run_prefill
    words = "a long story " * 45
    assert PREFILL_CHUNK < len(rendered([{"role": "user", "content": words}])) < HOT_CONTEXT - 20
    reply: list[TextIterator] = []

    def cancelling(*arguments: Any, **named: Any) -> object:
        reply[0].cancel()
        return run(*arguments, **named)

    monkeypatch.setattr(engine, "run_prefill", cancelling)
    reply.append(chat.send(words))
    assert list(reply[0]) == []
    assert (reply[0].result.token_ids, reply[0].result.finish_reason) == ([], "cancelled")
    assert len(chat.token_ids) == PREFILL_CHUNK, "what has run is not lost"
    monkeypatch.setattr(engine, "run_prefill", run)
    chat.rewind(messages=1)
    answer = chat.answer(max_new_tokens=5)
    "".join(answer)
    ids = rendered(chat.messages[:1])
    assert answer.result.prompt_tokens == len(ids) - PREFILL_CHUNK
    greedy = at_once([*ids, *answer.result.token_ids]).argmax(-1)[len(ids) - 1 : -1].tolist()
    assert answer.result.token_ids == greedy


# asyncio


def test_the_text_is_that_of_a_stream(whole: list[int]) -> None:
    async def read() -> None:
        stream = hot().astream(PROMPT, max_new_tokens=30)
        pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.result.text == hot().tokenizer.decode(whole)
        assert stream.result.token_ids == whole

    asyncio.run(read())


def test_leaving_the_loop_ends_it(whole: list[int]) -> None:
    async def read() -> None:
        model = hot()
        stream = model.astream(PROMPT, max_new_tokens=30)
        async for _ in stream:
            break
        await asyncio.sleep(0)  # the loop that was left is closed by the event loop
        await asyncio.sleep(0)
        assert stream.result.finish_reason == "cancelled"
        made = stream.result.token_ids
        assert made == whole[: len(made)]
        assert len(made) < 5
        assert [piece async for piece in stream] == []
        assert_fresh(model, whole)

    asyncio.run(read())


def test_a_cancelled_task_leaves_no_step_behind(
    whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(30)

    at_step(monkeypatch, 3, wait)

    async def read() -> None:
        chat = hot().chat()
        stream = chat.asend(PROMPT, max_new_tokens=30)

        async def consume() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(consume())
        assert await asyncio.to_thread(reached.wait, 30), "the event loop is free meanwhile"
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done(), "the step still runs"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.result.finish_reason == "cancelled"
        assert len(stream.result.token_ids) == 4
        held = chat.token_ids
        await asyncio.sleep(0.02)
        assert chat.token_ids == held
        again = chat.asend("And then?", max_new_tokens=5)
        assert "".join([piece async for piece in again]) == again.result.text
        ids = rendered(chat.messages[:-1])
        made = again.result.token_ids
        assert made == at_once([*ids, *made]).argmax(-1)[len(ids) - 1 : -1].tolist()

    asyncio.run(read())


def test_streams_at_once(whole: list[int]) -> None:
    async def text(prompt: str) -> str:
        return "".join([piece async for piece in hot().astream(prompt, max_new_tokens=25)])

    async def read() -> list[str]:
        return list(await asyncio.gather(*map(text, ("Hello", "abc", "What?"))))

    alone = [hot().generate(prompt, max_new_tokens=25).text for prompt in ("Hello", "abc", "What?")]
    assert asyncio.run(read()) == alone


def test_a_task_ends_it_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the object itself, while the reader waits."""
    at_step(monkeypatch, 2, lambda: time.sleep(0.05))

    async def read() -> str | None:
        stream = hot().astream(PROMPT, max_new_tokens=600)

        async def consume() -> list[str]:
            return [piece async for piece in stream]

        task = asyncio.create_task(consume())
        while not stream.result.token_ids:
            await asyncio.sleep(0.001)
        stream.cancel()
        assert "".join(await task) == stream.result.text
        return stream.result.finish_reason

    assert asyncio.run(read()) == "cancelled"
