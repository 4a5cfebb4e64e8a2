"""Single calls of a batch: what is refused, what fails, what buffers and threads must not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.batches import VOCABULARY, assert_behind, both, hot, prefilled, some_ids
from support.runtime_models import (
    hot_package,
    loaded,
)

from onnxlm import io_spec
from onnxlm.errors import InputError
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.sessions import Sessions


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
    """A session whose runs end well, and then may raise: an interrupt comes when Python runs again."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.broken = False

    def io_binding(self) -> Any:
        return self._session.io_binding()

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        self._session.run_with_iobinding(binding, options)
        if self.broken:
            raise KeyboardInterrupt


@both
def test_a_call_that_fails_counts_for_nothing(lowering: str) -> None:
    whole = hot(lowering)
    prefill, decode = Failing(whole.prefill), Failing(whole.decode)
    rows = some_ids(4, 6)
    batch = prefilled(dataclasses.replace(whole, prefill=prefill, decode=decode), rows)
    prefill.broken = decode.broken = True
    with pytest.raises(KeyboardInterrupt):
        batch.prefill_logits([[1], [2, 3]])
    with pytest.raises(KeyboardInterrupt):
        batch.decode_logits()
    prefill.broken = decode.broken = False
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
    (by_hand,) = sessions.decode.run([io_spec.LOGITS], batch.inputs([[1], [2]], io_spec.DECODE))
    batch.set_tokens([1, 2])
    np.testing.assert_allclose(by_hand[:, 0], batch.decode_logits(), rtol=0, atol=1e-5)


@both
def test_threads_change_no_number(lowering: str) -> None:
    prompts, results = some_ids(40, 80), []
    for threads in (1, 2):
        batch = Batch(loaded(hot_package(lowering).path, threads).sessions, 2)
        logits = [batch.prefill_logits(prompts)]
        for token in range(4):
            batch.set_tokens([token, token + 1])
            logits.append(batch.decode_logits().copy())
        results.append(np.stack(logits))
    scale = max(1.0, float(np.abs(results[0]).max()))
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-5 * scale)
