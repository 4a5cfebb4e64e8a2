"""A forked batch goes on as the whole row run at once would, and nothing of one shows in the other."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from support.runtime_models import HOT_CONTEXT, at_once, hot_package, loaded

from onnxlm.runtime.engine import Batch

both = pytest.mark.parametrize("lowering", ["ort", "portable"])


def row(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


def assert_holds(batch: Batch, ids: list[int]) -> None:
    """What comes behind the cached tokens is what comes behind `ids`."""
    logits = batch.prefill_logits([[1]])[0]
    batch.rewind(len(ids))
    theirs: NDArray[np.float32] = at_once([*ids, 1])[-1].numpy()
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@both
@pytest.mark.parametrize("length", [1, 255, 256, 257, HOT_CONTEXT - 2])
def test_a_fork_goes_on_alone(lowering: str, length: int) -> None:
    sessions = loaded(hot_package(lowering).path).sessions
    first, ids = Batch(sessions, 1), row(length, 0)
    first.prefill_tokens([ids])
    second = first.fork()
    first.prefill_tokens([[5]])
    assert_holds(second, ids)
    second.prefill_tokens([[7]])
    assert_holds(first, [*ids, 5])
    assert_holds(second, [*ids, 7])
    second.rewind(length // 2)
    second.set_tokens([9])
    second.decode_tokens()
    assert_holds(first, [*ids, 5])
    assert_holds(second, [*ids[: length // 2], 9])


@both
def test_a_fork_after_decode_steps(lowering: str) -> None:
    """The buffers that decode steps are bound to stay with the first."""
    sessions = loaded(hot_package(lowering).path).sessions
    first, ids = Batch(sessions, 1), row(20, 1)
    first.prefill_tokens([ids])
    for token in (3, 4):
        first.set_tokens([token])
        first.decode_tokens()
    second = first.fork()
    for batch, token in ((second, 8), (first, 5), (second, 9)):
        batch.set_tokens([token])
        batch.decode_tokens()
    assert_holds(first, [*ids, 3, 4, 5])
    assert_holds(second, [*ids, 3, 4, 8, 9])


@both
def test_rows_of_different_lengths(lowering: str) -> None:
    sessions = loaded(hot_package(lowering).path).sessions
    rows = [row(3, 2), row(40, 3)]
    first = Batch(sessions, 2)
    first.prefill_tokens(rows)
    second = first.fork()
    first.prefill_tokens([[1, 2, 3]] * 2)
    assert second.lengths.tolist() == [3, 40]
    logits = second.prefill_logits([[6], [7]])
    for i, token in enumerate((6, 7)):
        theirs = at_once([*rows[i], token])[-1].numpy()
        np.testing.assert_allclose(logits[i], theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@both
def test_a_fork_of_nothing(lowering: str) -> None:
    batch = Batch(loaded(hot_package(lowering).path).sessions, 1).fork()
    batch.prefill_tokens([[4, 5]])
    assert_holds(batch, [4, 5])
