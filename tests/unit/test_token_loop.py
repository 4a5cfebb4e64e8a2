"""The token loop: which tokens come, when each row ends, and what the cache holds then."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest
from support.runtime_models import at_once, counting_package, hot_package, loaded

from onnxlm.runtime.choosing import TokenChooser
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.randomness import uniforms
from onnxlm.runtime.sampling import DrawSettings, sample
from onnxlm.runtime.sampling_params import SamplingParams, params_of_rows
from onnxlm.runtime.sessions import Sessions
from onnxlm.runtime.stopping import RowLimits, RowStops
from onnxlm.runtime.token_loop import Timings, token_steps

DRAWN: dict[str, object] = {"temperature": 3.0, "top_k": 40, "top_p": 0.95, "do_sample": True}


def counting() -> Sessions:
    return loaded(counting_package().path).sessions


def hot(lowering: str = "ort") -> Sessions:
    return loaded(hot_package(lowering).path).sessions


def chooser(sessions: Sessions, prompts: Sequence[Sequence[int]], **fields: object) -> TokenChooser:
    params = params_of_rows(SamplingParams(), fields, len(prompts))
    return TokenChooser(params, prompts, [()] * len(prompts), sessions.vocab_size)


def stops_at(rooms: Sequence[int], most: int | None = None, eos: Collection[int] = ()) -> RowStops:
    return RowStops([RowLimits(room, most, eos) for room in rooms])


def run(
    batch: Batch, prompts: Sequence[Sequence[int]], choose: TokenChooser, stops: RowStops
) -> list[list[int]]:
    """The tokens of each row."""
    rows: list[list[int]] = [[] for _ in prompts]
    timings = Timings()
    for tokens, live in token_steps(batch, prompts, choose, stops, timings):
        for row in np.flatnonzero(live):
            rows[row].append(int(tokens[row]))
    steps = max((len(row) for row in rows), default=0)
    assert len(timings.steps_s) == max(0, steps - 1)
    assert (timings.ttft_s > 0) == (steps > 0)
    return rows


def test_each_row_ends_on_its_own() -> None:
    """By id, by the end of the context, and by number, all in one batch."""
    prompts = [[3], [20], list(range(11)), [4, 0, 0, 7]]
    stops = stops_at([15, 15, 5, 12], 6, {9})
    batch = Batch(counting(), 4)
    rows = run(batch, prompts, TokenChooser.greedy(4), stops)
    expected = [[4, 5, 6, 7, 8, 9], [21, 22, 23, 24, 25, 26], [11, 12, 13, 14, 15], [8, 9]]
    assert rows == expected
    assert stops.reasons == ["eos", "length", "context", "eos"]
    # Every token but each row's last has been run.
    held = [len(prompt) + len(row) - 1 for prompt, row in zip(prompts, expected, strict=True)]
    assert batch.lengths.tolist() == held


@pytest.mark.parametrize("lowering", ["ort", "portable"])
@pytest.mark.parametrize("fields", [{}, DRAWN], ids=["greedy", "drawn"])
def test_rows_that_ended_are_in_the_cache_as_they_were(
    lowering: str, fields: dict[str, object]
) -> None:
    """The end of one row does not touch its tokens while others go on."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(0, 96, size).tolist() for size in (4, 9, 6)]
    batch = Batch(hot(lowering), 3)
    choose = chooser(hot(lowering), prompts, **fields, seed=1)
    rows = run(batch, prompts, choose, stops_at([3, 12, 7]))
    assert [len(row) for row in rows] == [3, 12, 7]
    logits = batch.prefill_logits([[row[-1], 1] for row in rows])
    for ours, prompt, row in zip(logits, prompts, rows, strict=True):
        theirs = at_once([*prompt, *row, 1])[-1].numpy()
        scale = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * scale)


def test_nothing_is_run_when_no_row_may_have_a_token() -> None:
    batch = Batch(counting(), 2)
    stops = stops_at([3, 0], 0)
    assert run(batch, [[1], [2]], TokenChooser.greedy(2), stops) == [[], []]
    assert stops.reasons == ["length", "length"]
    assert batch.lengths.tolist() == [0, 0]


def test_a_loop_that_is_left_can_be_taken_up() -> None:
    """Its cache holds every token but the last one chosen."""
    batch = Batch(counting(), 1)
    steps = token_steps(batch, [[3, 4]], TokenChooser.greedy(), stops_at([14]), Timings())
    assert [int(next(steps)[0][0]) for _ in range(3)] == [5, 6, 7]
    steps.close()  # type: ignore[attr-defined]
    assert batch.lengths.tolist() == [4]
    assert run(batch, [[7]], TokenChooser.greedy(), stops_at([11], 2)) == [[8, 9]]
    assert batch.lengths.tolist() == [6]


def test_draws_are_those_from_the_logits_without_a_cache() -> None:
    """Row r, step s: as drawn from the whole sequence run at once, with seed + r."""
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    choose = chooser(hot(), prompts, **DRAWN, seed=11)
    rows = run(Batch(hot(), 3), prompts, choose, stops_at([100] * 3, 8))
    for row, prompt in enumerate(prompts):
        settings = DrawSettings.of([SamplingParams(**DRAWN, seed=11 + row)])  # type: ignore[arg-type]
        sequence = list(prompt)
        for step in range(8):
            uniform = uniforms(settings.seeds, step)
            sequence += sample(at_once(sequence)[-1:].numpy(), settings, uniform).tolist()
        assert rows[row] == sequence[len(prompt) :]
    assert len({tuple(row) for row in rows}) == 3


RULES = {"repetition_penalty": [1.3, 1.0, 2.0], "no_repeat_ngram_size": [0, 1, 2]}
ROWS = {
    "temperature": [0, 3.0, 2.0],
    "top_k": [0, 40, 3],
    "top_p": [1.0, 0.95, 0.5],
    "min_p": [0.0, 0.01, 0.2],
    "typical_p": [1.0, 0.8, 0.9],
    "presence_penalty": [0.0, 1.0, -1.0],
    "logit_bias": [{3: 2.0}, None, {4: -5.0}],
}


@pytest.mark.parametrize("fields", [DRAWN, RULES, ROWS | RULES], ids=["drawn", "ruled", "each"])
def test_a_row_gets_in_a_batch_what_it_gets_alone(fields: dict[str, object]) -> None:
    """By seed + row, with settings of its own, and whatever its neighbours' are."""
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]

    def drawn(rows: list[list[int]], seed: int, fields: dict[str, object]) -> list[list[int]]:
        choose = chooser(hot(), rows, seed=seed, **fields)
        return run(Batch(hot(), len(rows)), rows, choose, stops_at([100] * len(rows), 12))

    def of_row(row: int) -> dict[str, object]:
        return {k: v[row] if isinstance(v, list) else v for k, v in fields.items()}

    together = drawn(prompts, 7, fields)
    alone = [drawn([prompt], 7 + row, of_row(row))[0] for row, prompt in enumerate(prompts)]
    assert together == alone
    if fields is not RULES:
        assert together != drawn(prompts, 8, fields)
    backwards = {k: v[::-1] if isinstance(v, list) else v for k, v in fields.items()}
    seeds = {"seed": [9, 8, 7]}
    choose = chooser(hot(), prompts[::-1], **(backwards | seeds))
    again = run(Batch(hot(), 3), prompts[::-1], choose, stops_at([100] * 3, 12))
    assert again[::-1] == together


def test_several_rows_go_on_from_one_prompt() -> None:
    prompts, sources = [[5, 6, 7], [9, 10, 11, 12, 13]], np.array([0, 0, 0, 1])
    rows = [prompts[source] for source in sources]
    fields = {**DRAWN, "seed": [3, 4, 5, 6]}
    apart = run(Batch(hot(), 4), rows, chooser(hot(), rows, **fields), stops_at([50] * 4, 9))
    batch, got = Batch(hot(), 2), [[], [], [], []]  # type: ignore[var-annotated]
    steps = token_steps(
        batch, prompts, chooser(hot(), rows, **fields), stops_at([50] * 4, 9), Timings(), sources
    )
    for tokens, _ in steps:
        for row, token in zip(got, tokens.tolist(), strict=True):
            row.append(token)
    assert got == apart
    assert batch.lengths.tolist() == [3 + 8, 3 + 8, 3 + 8, 5 + 8]
