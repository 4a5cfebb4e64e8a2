"""Batches of hot packages against transformers, each row alone, at once, without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.hot_packages import package as fp16_source
from support.parity import assert_logits_close
from support.runtime_models import (
    ALPHABET,
    COUNTING_CONTEXT,
    HOT_CONFIG,
    HOT_CONTEXT,
    at_once,
    counting_package,
    hot_package,
    loaded,
)

from onnxlm import io_spec
from onnxlm.errors import InputError
from onnxlm.package import Package
from onnxlm.runtime.engine import PREFILL_CHUNK, Batch, Sessions

VOCABULARY = int(HOT_CONFIG["vocab_size"])
LOWERINGS = ("ort", "portable")
both = pytest.mark.parametrize("lowering", LOWERINGS)


def opened(package: Package, threads: int = 1) -> Sessions:
    return loaded(package.path, threads).sessions


def hot(lowering: str = "ort") -> Sessions:
    return opened(hot_package(lowering))


def some_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in lengths]


def assert_close(ours: NDArray[np.float32], theirs: torch.Tensor) -> None:
    assert_logits_close(torch.from_numpy(ours), theirs)


def assert_behind(ours: NDArray[np.float32], rows: Sequence[Sequence[int]]) -> None:
    """Logits [B, V] are those behind whole rows."""
    assert_close(ours, torch.stack([at_once(row)[-1] for row in rows]))


def prefilled(sessions: Sessions, rows: Sequence[Sequence[int]]) -> Batch:
    batch = Batch(sessions, len(rows))
    batch.prefill_logits(rows)
    return batch


@both
def test_rows_of_a_batch_are_what_they_are_alone(lowering: str) -> None:
    prompts = some_ids(3, 7, 11)
    batch = Batch(hot(lowering), 3)
    assert_behind(batch.prefill_logits(prompts), prompts)
    alone = [Batch(hot(lowering), 1) for _ in prompts]
    tokens = np.concatenate([b.prefill_tokens([p]) for b, p in zip(alone, prompts, strict=True)])
    again = Batch(hot(lowering), 3)
    assert again.prefill_tokens(prompts).tolist() == tokens.tolist()
    rows = [list(prompt) for prompt in prompts]
    for one in (batch, again):
        one.set_tokens(tokens)
    for _ in range(12):
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        assert_behind(batch.decode_logits(), rows)
        for one, token in zip(alone, tokens.tolist(), strict=True):
            one.set_tokens([token])
        tokens = np.concatenate([one.decode_tokens() for one in alone])
        assert again.decode_tokens().tolist() == tokens.tolist()
        batch.set_tokens(tokens)
    assert batch.lengths.tolist() == [15, 19, 23]


def test_rows_of_an_fp16_batch_are_what_they_are_alone() -> None:
    sessions = opened(fp16_source("ort", "fp16"))
    prompts = [[id_ % 96 for id_ in row] for row in some_ids(3, 7, 11)]
    batch, alone = Batch(sessions, 3), [Batch(sessions, 1) for _ in range(3)]
    assert {b.numpy().dtype for b in batch.cache.buffers.values()} == {np.dtype(np.float16)}
    ours = batch.prefill_logits(prompts)
    theirs = np.concatenate([b.prefill_logits([p]) for b, p in zip(alone, prompts, strict=True)])
    for step in range(6):
        assert ours.dtype == np.float32
        assert_logits_close(torch.from_numpy(ours), torch.from_numpy(theirs), 1e-2)
        for b in (batch, *alone):
            b.set_tokens([step + 1] * b.rows)
        ours = batch.decode_logits()
        theirs = np.concatenate([b.decode_logits() for b in alone])


@both
def test_a_row_that_idles_keeps_what_it_holds(lowering: str) -> None:
    """Rows end at different steps; more tokens of all rows come behind what they hold then."""
    rows = some_ids(9, 2, 5)
    batch = prefilled(hot(lowering), rows)
    steps = [(True, True, False), (True, False, False), (False, False, True), (False, True, False)]
    for number, step in enumerate(steps):
        live = np.array(step)
        batch.set_tokens([number + 7] * 3)
        for row in np.flatnonzero(live):
            rows[row].append(number + 7)
        logits = batch.decode_logits(live)
        assert_behind(logits[live], [rows[row] for row in np.flatnonzero(live)])
    assert batch.lengths.tolist() == [len(row) for row in rows]
    more = some_ids(1, 6, 3, seed=1)
    whole = [row + new for row, new in zip(rows, more, strict=True)]
    assert_behind(batch.prefill_logits(more), whole)


@both
@pytest.mark.parametrize("lengths", [(20,), (3, 20, 11)])
def test_300_tokens_pass_the_growth_of_the_cache(lowering: str, lengths: tuple[int, ...]) -> None:
    """Greedy decoding without a cache would choose the same tokens."""
    rows = some_ids(*lengths)
    batch = Batch(hot(lowering), len(rows))
    tokens = batch.prefill_tokens(rows)
    batch.set_tokens(tokens)
    made = [tokens]
    for _ in range(299):
        tokens = batch.decode_tokens()
        made.append(tokens)
    for row, prompt in enumerate(rows):
        new = [int(tokens[row]) for tokens in made]
        logits = at_once([*prompt, *new])
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new
    sizes = {buffer.shape()[2] for buffer in batch.cache.buffers.values()}
    assert sizes == ({512} if lowering == "ort" else {max(lengths) + 299})


@both
def test_a_prompt_of_several_chunks(lowering: str) -> None:
    """Rows that end in the first chunk are right beside one that goes on."""
    rows = some_ids(PREFILL_CHUNK + 60, 5, PREFILL_CHUNK)
    batch = Batch(hot(lowering), 3)
    assert_behind(batch.prefill_logits(rows), rows)
    greedy = Batch(hot(lowering), 3).prefill_tokens(rows)
    assert greedy.tolist() == [int(at_once(row)[-1].argmax()) for row in rows]
    assert batch.lengths.tolist() == [len(row) for row in rows]
    batch.set_tokens([1, 2, 3])
    assert_behind(batch.decode_logits(), [[*r, t] for r, t in zip(rows, [1, 2, 3], strict=True)])


@both
def test_logits_behind_every_token_of_chunks(lowering: str) -> None:
    (ids,) = some_ids(12)
    batch = Batch(hot(lowering), 1)
    parts = [batch.prefill_all_logits(ids[a:b]) for a, b in ((0, 5), (5, 6), (6, 12))]
    assert [len(part) for part in parts] == [5, 1, 6]
    assert_close(np.concatenate(parts), at_once(ids))


@both
def test_chunks_behind_ragged_pasts_up_to_the_end_of_the_context(lowering: str) -> None:
    """The longest past and the longest chunk are of different rows: together they pass the context."""
    sessions = dataclasses.replace(hot(lowering), context_length=40)
    rows, more = some_ids(30, 4, 38), some_ids(10, 36, 1, seed=1)
    batch = prefilled(sessions, rows)
    whole = [row + new for row, new in zip(rows, more, strict=True)]
    assert_behind(batch.prefill_logits(more), whole)
    assert batch.lengths.tolist() == [40, 40, 39]


def test_the_kernel_accepts_ragged_rows_up_to_the_end_of_the_context() -> None:
    """Its rotary table has 16 rows: a mask of more columns is refused, so padding must not count."""
    batch = Batch(opened(counting_package()), 3)
    following = batch.prefill_tokens([list(range(16)), [4], [5, 6, 7]])
    assert following.tolist() == [16, 5, 8]
    live = np.array([False, True, True])
    batch.set_tokens(following)
    for step in range(13):
        tokens = batch.decode_tokens(live)
        assert tokens[1:].tolist() == [6 + step, 9 + step]
    assert batch.lengths[1:].tolist() == [14, 16]
    live[2] = False
    assert batch.decode_tokens(live)[1] == 19
    # Two rows were full and idled: each gave up a column, as the step writes one in every row.
    assert batch.lengths.tolist() == [15, 15, 15]
    batch.decode_tokens()
    with pytest.raises(
        InputError, match=r"the context is full; found 17 positions; allowed: up to 16"
    ):
        batch.decode_tokens()


@both
def test_rewinding(lowering: str) -> None:
    rows = some_ids(9, 14)
    batch = prefilled(hot(lowering), rows)
    batch.set_tokens([1, 2])
    batch.decode_tokens()
    for lengths in (np.array([6, 15]), np.array([6, 3])):
        batch.rewind(lengths)
        assert batch.lengths.tolist() == lengths.tolist()
    more = some_ids(5, 2, seed=1)
    whole = [row[:kept] + new for row, kept, new in zip(rows, (6, 3), more, strict=True)]
    assert_behind(batch.prefill_logits(more), whole)
    batch.rewind(0)
    assert_behind(batch.prefill_logits(more), more)
    batch.set_tokens([3, 4])
    assert_behind(batch.decode_logits(), [[*more[0], 3], [*more[1], 4]])


@both
def test_rewinding_by_nothing_changes_nothing(lowering: str) -> None:
    (ids,) = some_ids(6)
    batch = prefilled(hot(lowering), [ids])
    batch.rewind(6)
    batch.set_tokens([1])
    assert_behind(batch.decode_logits(), [[*ids, 1]])


@pytest.mark.parametrize("lengths", [-1, 7, np.array([6])])
def test_rewinding_past_what_is_cached(lengths: Any) -> None:
    batch = prefilled(hot(), [[1, 2, 3, 4, 5]])
    message = r"can be rewound to what it holds; found \[.*\]; allowed: 0 to \[5\]"
    with pytest.raises(InputError, match=message):
        batch.rewind(lengths)
    assert batch.lengths.tolist() == [5]


@both
@pytest.mark.parametrize("wrong", [-1, VOCABULARY, VOCABULARY + 5])
def test_ids_outside_the_vocabulary(lowering: str, wrong: int) -> None:
    batch = prefilled(hot(lowering), [[1, 2]])
    for call in (
        lambda: batch.prefill_tokens([[3, wrong]]),
        lambda: batch.prefill_logits([[3, wrong]]),
        lambda: batch.prefill_all_logits([3, wrong]),
    ):
        with pytest.raises(
            InputError, match=f"position 1 is outside the vocabulary; found {wrong};"
        ):
            call()
    with pytest.raises(InputError, match=f"outside the vocabulary; found {wrong};"):
        batch.set_tokens([wrong])
    batch.set_tokens([3])
    assert_behind(batch.decode_logits(), [[1, 2, 3]])


@pytest.mark.parametrize("rows", [[[]], [[1], []]])
def test_an_empty_row(rows: list[list[int]]) -> None:
    with pytest.raises(InputError, match="a prompt is empty; give at least one token"):
        Batch(hot(), len(rows)).prefill_tokens(rows)


def test_another_number_of_rows_than_the_batch_has() -> None:
    with pytest.raises(ValueError, match="3 rows for a batch of 2"):
        Batch(hot(), 2).prefill_tokens([[1], [2], [3]])


@both
def test_a_prompt_that_does_not_fit_changes_nothing(lowering: str) -> None:
    sessions = dataclasses.replace(hot(lowering), context_length=8)
    rows = some_ids(3, 6)
    batch = prefilled(sessions, rows)
    with pytest.raises(
        InputError, match="the context is full; found 9 positions; allowed: up to 8"
    ):
        batch.prefill_logits([[1], [2, 3, 4]])
    batch.set_tokens([5, 6])
    assert_behind(batch.decode_logits(), [[*rows[0], 5], [*rows[1], 6]])


class Failing:
    """A session whose runs end well, and then raise: an interrupt comes when Python runs again."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def io_binding(self) -> Any:
        return self._session.io_binding()

    def run_with_iobinding(self, binding: Any) -> None:
        self._session.run_with_iobinding(binding)
        raise KeyboardInterrupt


@both
def test_a_call_that_fails_counts_for_nothing(lowering: str) -> None:
    whole = hot(lowering)
    broken = dataclasses.replace(
        whole, prefill=Failing(whole.prefill), decode=Failing(whole.decode)
    )
    rows = some_ids(4, 6)
    batch = prefilled(whole, rows)
    batch._sessions = broken
    with pytest.raises(KeyboardInterrupt):
        batch.prefill_logits([[1], [2, 3]])
    with pytest.raises(KeyboardInterrupt):
        batch.decode_logits()
    batch._sessions = whole
    batch._bindings.clear()
    assert batch.lengths.tolist() == [4, 6]
    batch.set_tokens([5, 6])
    assert_behind(batch.decode_logits(), [[*rows[0], 5], [*rows[1], 6]])


@both
def test_results_of_a_step_stay_when_the_next_runs(lowering: str) -> None:
    rows = some_ids(3, 5)
    batch = Batch(hot(lowering), 2)
    results: list[NDArray[Any]] = [batch.prefill_logits(rows), batch.prefill_tokens(rows)]
    batch.set_tokens(results[-1])
    results += [batch.decode_tokens(), batch.decode_tokens()]
    view = batch.decode_logits()
    results.append(view.copy())
    before = [result.copy() for result in results]
    batch.set_tokens([9, 8])
    batch.decode_logits()
    batch.prefill_logits(rows)
    batch.decode_tokens()
    for result, earlier in zip(results, before, strict=True):
        np.testing.assert_array_equal(result, earlier)
    assert not np.array_equal(view, results[-1])  # a view, as it says


def plain(
    sessions: Sessions, prompts: Sequence[Sequence[int]], forced: Sequence[Sequence[int]], room: int
) -> list[NDArray[np.float32]]:
    """Logits of a prefill of equal lengths and of forced steps, by `session.run` and copies.

    Args:
        sessions: In-place caches.
        prompts: [B][S].
        forced: Tokens of each step, [steps][B].
        room: Columns of the caches that are fed; 0 for as many as there are tokens.
    """
    rows, start = len(prompts), len(prompts[0])
    past: dict[str, NDArray[Any]] = {}
    results = []
    for step, ids in enumerate([prompts, *([[t] for t in tokens] for tokens in forced)]):
        session = sessions.decode if step else sessions.prefill
        total = start + step
        for state in sessions.states:
            columns = room or total - len(ids[0])
            fed = np.zeros((rows, state.shape[1], columns, state.shape[3]), dtype=np.float32)
            kept = past.get(state.past, fed)[:, :, :columns]
            fed[:, :, : kept.shape[2]] = kept
            past[state.past] = fed
        names = [io_spec.LOGITS, *(state.present for state in sessions.states)]
        mask = np.ones((rows, total), dtype=np.int64)
        feeds = {io_spec.INPUT_IDS: np.array(ids), io_spec.ATTENTION_MASK: mask, **past}
        logits, *present = session.run(names, feeds)
        past = {s.past: value for s, value in zip(sessions.states, present, strict=True)}
        results.append(logits[:, 0])
    return results


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("room", [0, 256], ids=["grown", "with room"])
def test_bound_buffers_change_no_bit(rows: int, room: int) -> None:
    prompts, forced = some_ids(*[7] * rows), some_ids(*[rows] * 6, seed=1)
    batch = Batch(hot(), rows)
    ours = [batch.prefill_logits(prompts)]
    for tokens in forced:
        batch.set_tokens(tokens)
        ours.append(batch.decode_logits().copy())
    for mine, copied in zip(ours, plain(hot(), prompts, forced, room), strict=True):
        np.testing.assert_array_equal(mine, copied)


@both
def test_what_a_call_is_fed(lowering: str) -> None:
    """The arrays of `inputs`, run by hand, are the next call."""
    sessions = hot(lowering)
    batch = prefilled(sessions, some_ids(3, 8))
    more = some_ids(4, 2, seed=1)
    feeds = batch.inputs(more)
    (by_hand,) = sessions.prefill.run([io_spec.LOGITS], feeds)
    np.testing.assert_allclose(by_hand[:, 0], batch.prefill_logits(more), rtol=0, atol=1e-5)
    (by_hand,) = sessions.decode.run([io_spec.LOGITS], batch.inputs([[1], [2]]))
    batch.set_tokens([1, 2])
    np.testing.assert_allclose(by_hand[:, 0], batch.decode_logits(), rtol=0, atol=1e-5)


@both
def test_threads_change_no_number(lowering: str) -> None:
    prompts, results = some_ids(40, 80), []
    for threads in (1, 2):
        batch = Batch(opened(hot_package(lowering), threads), 2)
        logits = [batch.prefill_logits(prompts)]
        for token in range(4):
            batch.set_tokens([token, token + 1])
            logits.append(batch.decode_logits().copy())
        results.append(np.stack(logits))
    scale = max(1.0, float(np.abs(results[0]).max()))
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-5 * scale)


def test_the_cache_has_no_more_room_than_the_context() -> None:
    batch = prefilled(opened(counting_package()), [[1], [2]])
    assert {buffer.shape()[2] for buffer in batch.cache.buffers.values()} == {COUNTING_CONTEXT}
    batch = prefilled(hot(), some_ids(600))
    assert {buffer.shape()[2] for buffer in batch.cache.buffers.values()} == {HOT_CONTEXT}
    assert len(ALPHABET) > COUNTING_CONTEXT
