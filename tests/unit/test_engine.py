"""Batches of hot packages against transformers, each row alone, at once, without a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from support.batches import assert_behind, assert_close, both, hot, prefilled, some_ids
from support.hot_packages import package as fp16_source
from support.parity import assert_logits_close
from support.runtime_models import (
    ALPHABET,
    COUNTING_CONTEXT,
    HOT_CONTEXT,
    at_once,
    counting_package,
    loaded,
)

from onnxlm.errors import InputError
from onnxlm.runtime import engine
from onnxlm.runtime.arrays import Ids
from onnxlm.runtime.engine import PREFILL_CHUNK, Batch
from onnxlm.runtime.kv_cache import KVCache


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
    sessions = loaded(fp16_source("ort", "fp16").path).sessions
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


def test_calls_behind_a_long_past_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head has scores of every new token by every column: of a call, never more than so many."""
    run = engine.run_prefill
    sizes: list[tuple[int, int]] = []

    def counted(session: ort.InferenceSession, cache: KVCache, ids: Ids, *more: Any) -> object:
        sizes.append((ids.shape[1], ids.size * (int(cache.lengths.max()) + ids.shape[1])))
        return run(session, cache, ids, *more)

    monkeypatch.setattr(engine, "run_prefill", counted)
    monkeypatch.setattr(engine, "_CALL_SCORES", 2 * 50_000)
    rows = some_ids(PREFILL_CHUNK + 130, PREFILL_CHUNK + 100)
    batch = Batch(hot("ort"), 2)
    assert_behind(batch.prefill_logits(rows), rows)
    lengths, scores = zip(*sizes, strict=True)
    assert len(lengths) > 2
    assert lengths[0] > lengths[1] >= engine._FEWEST_COLUMNS
    assert max(scores) <= 2 * 50_000


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
    batch = Batch(loaded(counting_package().path).sessions, 3)
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
    # Rows that idle are left out, and need no column.
    assert batch.lengths.tolist() == [16, 15, 16]
    batch.rewind([15, 15, 15])
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


def test_the_cache_has_no_more_room_than_the_context() -> None:
    batch = prefilled(loaded(counting_package().path).sessions, [[1], [2]])
    assert {buffer.shape()[2] for buffer in batch.cache.buffers.values()} == {COUNTING_CONTEXT}
    batch = prefilled(hot(), some_ids(600))
    assert {buffer.shape()[2] for buffer in batch.cache.buffers.values()} == {HOT_CONTEXT}
    assert len(ALPHABET) > COUNTING_CONTEXT


@both
def test_any_rows_may_go_on_at_any_call(lowering: str) -> None:
    """Steps and chunks of some rows, in every pattern: each row is what it is alone."""
    generator = np.random.default_rng(3)
    rows = some_ids(5, 9, 2, 7)
    batch = prefilled(hot(lowering), rows)
    for call in range(24):
        live = generator.random(4) < 0.6
        live[generator.integers(4)] = True
        going = np.flatnonzero(live)
        if call % 3 == 2:
            new = [some_ids(int(n), seed=call)[0] for n in generator.integers(1, 5, 4) * live]
            logits = batch.extend_logits(new)
            longest = max(map(len, new))
            for row in going:
                rows[row] += new[row]
                theirs = at_once(rows[row])[-len(new[row]) :]
                assert_close(logits[row, longest - len(new[row]) :], theirs)
            continue
        batch.set_tokens([call + 10 * row for row in range(4)])
        for row in going:
            rows[row].append(call + 10 * int(row))
        assert_behind(batch.decode_logits(live)[live], [rows[row] for row in going])
    assert batch.lengths.tolist() == [len(row) for row in rows]
    more = some_ids(2, 3, 1, 2, seed=1)
    assert_behind(batch.prefill_logits(more), [a + b for a, b in zip(rows, more, strict=True)])


def test_rows_that_ended_are_not_run_and_the_others_bits_are_those_of_buffers_of_their_own() -> (
    None
):
    prompts = some_ids(4, 9, 6)
    batch = prefilled(hot(), prompts)
    own = batch.fork()
    own.reorder(np.array([2, 1]))
    live = np.array([False, True, True])
    for token in range(3):
        batch.set_tokens([0, token, token + 1])
        own.set_tokens([token + 1, token])
        ours, theirs = batch.decode_logits(live), own.decode_logits()
        np.testing.assert_array_equal(ours[[2, 1]], theirs)
        assert batch.cache.running == 2


def test_nothing_to_run() -> None:
    batch = prefilled(hot(), some_ids(3, 4))
    with pytest.raises(InputError, match="a prompt is empty"):
        batch.extend_logits([[], []])
