"""Decoding with guesses gives the tokens of decoding without them, and undoes what it guessed wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from support.batches import both, hot, prefilled, some_ids
from support.runtime_models import HOT_CONTEXT, at_once

from onnxlm.runtime.draft_policy import StepCosts
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.sessions import Sessions
from onnxlm.runtime.speculation import SpeculativeBatch
from onnxlm.runtime.state_buffers import bytes_at


class Free(StepCosts):
    """A machine on which more tokens cost nothing more: any guess pays."""

    def ratio(self, rows: int, tokens: int) -> float:
        return 0.5


class Counting:
    """A batch that counts its calls."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.calls = 0
        self.steps = 0

    def __getattr__(self, name: str) -> object:
        self.calls += name in ("decode_tokens", "decode_logits", "extend_logits")
        self.steps += name in ("decode_tokens", "decode_logits")
        return getattr(self._batch, name)


def greedy(sessions: Sessions, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    batch = Batch(sessions, len(prompts))
    made = [batch.prefill_tokens(prompts)]
    batch.set_tokens(made[0])
    made += [batch.decode_tokens() for _ in range(steps)]
    return np.stack(made, axis=1).tolist()


def copying(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts that say everything three times."""
    return [ids * 3 for ids in some_ids(*lengths, seed=seed)]


@both
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_tokens_are_the_same(lowering: str, rows: int, seed: int) -> None:
    sessions = hot(lowering)
    prompts = copying(*(4 + 3 * row + seed for row in range(rows)), seed=seed)
    expected = greedy(sessions, prompts, 60)
    inner = Counting(Batch(sessions, rows))
    batch = SpeculativeBatch(inner, [[]] * rows, [5] * rows, Free())
    made = [batch.prefill_tokens(prompts)]
    batch.set_tokens(made[0])
    for step in range(60):
        made.append(batch.decode_tokens())
        assert batch.lengths.tolist() == [len(p) + step + 1 for p in prompts]
    assert np.stack(made, axis=1).tolist() == expected
    assert inner.calls <= 60
    if rows == 1:
        assert inner.steps < inner.calls < 60
    batch.settle()
    assert inner.lengths.tolist() == [len(p) + 60 for p in prompts]
    more = some_ids(*[3] * rows, seed=9)
    logits = batch.prefill_logits(more)
    for row, prompt in enumerate(prompts):
        theirs = at_once([*prompt, *expected[row][:-1], *more[row]])[-1].numpy()
        np.testing.assert_allclose(
            logits[row], theirs, rtol=0, atol=1e-4 * max(1, abs(theirs).max())
        )


@both
def test_rows_that_end_while_guesses_are_ahead(lowering: str) -> None:
    sessions = hot(lowering)
    prompts = copying(5, 6, 7)
    expected = greedy(sessions, prompts, 40)
    batch = SpeculativeBatch(Batch(sessions, 3), [[]] * 3, [6] * 3, Free())
    made = [[int(t)] for t in batch.prefill_tokens(prompts)]
    batch.set_tokens([row[0] for row in made])
    ends = np.array([7, 40, 22])
    for step in range(40):
        live = ends > step
        tokens = batch.decode_tokens(live)
        for row in np.flatnonzero(live):
            made[row].append(int(tokens[row]))
    assert made == [row[: end + 1] for row, end in zip(expected, ends, strict=True)]
    assert batch.lengths.tolist() == [len(p) + int(e) for p, e in zip(prompts, ends, strict=True)]


def test_logits_are_those_behind_the_chosen_tokens() -> None:
    """Whatever is chosen: the guess, or another token."""
    (prompt,) = copying(6)
    generator = np.random.default_rng(2)
    batch = SpeculativeBatch(prefilled(hot(), [prompt]), [prompt], [4], Free())
    row = list(prompt)
    for _ in range(60):
        copied = row[len(row) % 6]
        token = copied if generator.random() < 0.7 else int(generator.integers(100))
        batch.set_tokens([token])
        row.append(token)
        theirs = at_once(row)[-1].numpy()
        ours = batch.decode_logits()[0]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * max(1, abs(theirs).max()))
        assert batch.lengths.tolist() == [len(row)]


def drawn(batch: Batch | SpeculativeBatch, prompt: list[int], seed: int) -> list[int]:
    """Tokens drawn from the softmax by the numbers of one generator."""
    generator = np.random.default_rng(seed)

    def draw(logits: NDArray[np.float32]) -> int:
        weights = np.exp(logits - logits.max()).astype(np.float64).cumsum()
        return int((weights > generator.random() * weights[-1]).argmax())

    tokens = [draw(batch.prefill_logits([prompt])[0])]
    for _ in range(40):
        batch.set_tokens(tokens[-1:])
        tokens.append(draw(batch.decode_logits()[0]))
    return tokens


def test_draws_of_one_seed_are_the_same() -> None:
    guessed = 0
    for seed in range(8):
        (prompt,) = copying(7, seed=seed)
        inner = Counting(Batch(hot(), 1))
        ours = drawn(SpeculativeBatch(inner, [[]], [5], Free()), prompt, seed)
        assert ours == drawn(Batch(hot(), 1), prompt, seed)
        guessed += inner.calls - inner.steps
    assert guessed


class Chain:
    """Stands for a batch of one row whose logits depend on the last token alone, as `table` says."""

    rows, context_length = 1, 10**9

    def __init__(self, table: NDArray[np.float32]) -> None:
        self._table = table
        self._token = 0
        self.lengths = np.zeros(1, dtype=np.int64)
        self.guesses = 0

    def set_tokens(self, tokens: NDArray[np.int64]) -> None:
        self._token = int(tokens[0])

    def decode_logits(self, live: NDArray[np.bool_]) -> NDArray[np.float32]:
        self.lengths = self.lengths + 1
        return self._table[[self._token]]

    def extend_logits(self, rows: list[list[int]]) -> NDArray[np.float32]:
        self.guesses += len(rows[0]) - 1
        self.lengths = self.lengths + len(rows[0])
        return self._table[rows[0]][None]

    def rewind(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths.copy()


def test_200_000_draws_have_the_distribution_of_the_logits() -> None:
    """Token by token before them, by chi-square; most guesses are wrong, many are right."""
    generator = np.random.default_rng(0)
    table = generator.normal(0, 1.2, (6, 6)).astype(np.float32)
    shares = np.exp(table.astype(np.float64))
    shares /= shares.sum(axis=1, keepdims=True)
    chain = Chain(table)
    batch = SpeculativeBatch(chain, [[0]], [3], Free())
    seen = np.zeros((6, 6))
    token = 0
    for uniform in generator.random(200_000):
        batch.set_tokens([token])
        logits = batch.decode_logits()[0]
        weights = np.exp(logits).cumsum()
        following = int((weights > uniform * weights[-1]).argmax())
        seen[token, following] += 1
        token = following
    assert chain.guesses > 100_000
    assert chain.lengths[0] < 200_000 + 4
    expected = seen.sum(axis=1, keepdims=True) * shares
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    # 6 rows with 5 degrees of freedom each: the 99.9 % quantile for 30.
    assert chi_square < 59.7


def test_guesses_stay_within_the_context() -> None:
    (prompt,) = copying(HOT_CONTEXT // 3 - 2)
    left = HOT_CONTEXT - len(prompt)
    expected = greedy(hot(), [prompt], left)
    batch = SpeculativeBatch(Batch(hot(), 1), [[]], [8], Free())
    made = batch.prefill_tokens([prompt]).tolist()
    batch.set_tokens(made)
    made += [int(batch.decode_tokens()[0]) for _ in range(left)]
    assert [made] == expected


def test_where_guesses_find_no_room_a_step_may() -> None:
    (prompt,) = copying(4)
    sessions = hot()
    tight = dataclasses.replace(sessions, kv_budget=bytes_at(sessions.states, 1, len(prompt) + 3))
    batch = SpeculativeBatch(Batch(tight, 1), [[]], [8], Free())
    made = batch.prefill_tokens([prompt]).tolist()
    batch.set_tokens(made)
    made += [int(batch.decode_tokens()[0]) for _ in range(3)]
    assert [made] == greedy(sessions, [prompt], 3)


def test_rows_change_places() -> None:
    prompts = copying(5, 8)
    batch = SpeculativeBatch(prefilled(hot(), prompts), prompts, [4, 4], Free())
    rows = [[*prompt, prompt[0]] for prompt in prompts]
    batch.set_tokens([row[-1] for row in rows])
    batch.decode_logits()
    batch.reorder(np.array([1, 1, 0]))
    rows = [list(rows[source]) for source in (1, 1, 0)]
    for step in range(6):
        new = [row[len(row) - period] for row, period in zip(rows, (8, 8, 5), strict=True)]
        new[1] = 3 * step
        batch.set_tokens(new)
        for row, token in zip(rows, new, strict=True):
            row.append(token)
        logits = batch.decode_logits()
        for ours, row in zip(logits, rows, strict=True):
            theirs = at_once(row)[-1].numpy()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * max(1, abs(theirs).max()))


@both
def test_a_fork_taken_while_guesses_are_ahead_holds_what_counts(lowering: str) -> None:
    (prompt,) = copying(6)
    inner = Batch(hot(lowering), 1)
    batch = SpeculativeBatch(inner, [[]], [5], Free())
    made = batch.prefill_tokens([prompt]).tolist()
    batch.set_tokens(made)
    for _ in range(30):
        held = [*prompt, *made]
        made += batch.decode_tokens().tolist()
        assert inner.lengths.tolist() == [len(held)]
        fork = inner.fork()
        assert fork.lengths.tolist() == [len(held)]
        theirs = at_once([*held, 7])[-1].numpy()
        ours = fork.prefill_logits([[7]])[0]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * max(1, abs(theirs).max()))
    assert [made] == greedy(hot(lowering), [prompt], 30)


def test_a_row_that_allows_no_guesses_holds_the_others_back() -> None:
    prompts = copying(5, 6)
    inner = Counting(Batch(hot(), 2))
    batch = SpeculativeBatch(inner, [[], []], [5, 0], Free())
    made = [batch.prefill_tokens(prompts)]
    batch.set_tokens(made[0])
    made += [batch.decode_tokens(np.array([True, step < 10])) for step in range(30)]
    expected = greedy(hot(), prompts, 30)
    assert [int(tokens[0]) for tokens in made] == expected[0]
    assert [int(tokens[1]) for tokens in made[:11]] == expected[1][:11]
    assert inner.steps >= 10
    assert inner.calls > inner.steps
