"""The token loop: which tokens come, when each row ends, and what the cache holds then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.runtime_models import at_once, counting_package, hot_package, loaded

from onnxlm.runtime.engine import Batch, Sessions
from onnxlm.runtime.generate import Timings, token_steps
from onnxlm.runtime.sampling import row_seeds, sample
from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.stopping import RowStops

DRAWN = {"do_sample": True, "temperature": 3.0, "top_k": 40, "top_p": 0.95}


def counting() -> Sessions:
    return loaded(counting_package().path).sessions


def hot(lowering: str = "ort") -> Sessions:
    return loaded(hot_package(lowering).path).sessions


def run(
    batch: Batch, prompts: Sequence[Sequence[int]], params: SamplingParams, stops: RowStops
) -> list[list[int]]:
    """The tokens of each row."""
    rows: list[list[int]] = [[] for _ in prompts]
    timings = Timings()
    for tokens, live in token_steps(batch, prompts, params, stops, timings):
        for row in np.flatnonzero(live):
            rows[row].append(int(tokens[row]))
    steps = max((len(row) for row in rows), default=0)
    assert len(timings.steps_s) == max(0, steps - 1)
    assert (timings.ttft_s > 0) == (steps > 0)
    return rows


def test_each_row_ends_on_its_own() -> None:
    """By id, by the end of the context, and by number, all in one batch."""
    prompts = [[3], [20], list(range(11)), [4, 0, 0, 7]]
    stops = RowStops({9}, 6, [15, 15, 5, 12])
    batch = Batch(counting(), 4)
    rows = run(batch, prompts, SamplingParams(), stops)
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
    batch, params = Batch(hot(lowering), 3), SamplingParams(**fields, seed=1)  # type: ignore[arg-type]
    rows = run(batch, prompts, params, RowStops((), None, [3, 12, 7]))
    assert [len(row) for row in rows] == [3, 12, 7]
    logits = batch.prefill_logits([[row[-1], 1] for row in rows])
    for ours, prompt, row in zip(logits, prompts, rows, strict=True):
        theirs = at_once([*prompt, *row, 1])[-1].numpy()
        scale = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * scale)


def test_nothing_is_run_when_no_row_may_have_a_token() -> None:
    batch = Batch(counting(), 2)
    stops = RowStops((), 0, [3, 0])
    assert run(batch, [[1], [2]], SamplingParams(), stops) == [[], []]
    assert stops.reasons == ["length", "length"]
    assert batch.lengths.tolist() == [0, 0]


def test_a_loop_that_is_left_can_be_taken_up() -> None:
    """Its cache holds every token but the last one chosen."""
    batch = Batch(counting(), 1)
    steps = token_steps(batch, [[3, 4]], SamplingParams(), RowStops((), None, [14]), Timings())
    assert [int(next(steps)[0][0]) for _ in range(3)] == [5, 6, 7]
    steps.close()  # type: ignore[attr-defined]
    assert batch.lengths.tolist() == [4]
    assert run(batch, [[7]], SamplingParams(), RowStops((), 2, [11])) == [[8, 9]]
    assert batch.lengths.tolist() == [6]


def test_draws_are_those_from_the_logits_without_a_cache() -> None:
    """Row r, step s: as drawn from the whole sequence run at once, with seed + r."""
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    params = SamplingParams(**DRAWN, seed=11)  # type: ignore[arg-type]
    rows = run(Batch(hot(), 3), prompts, params, RowStops((), 8, [100] * 3))
    seeds = row_seeds(11, 3)
    for row, prompt in enumerate(prompts):
        sequence = list(prompt)
        for step in range(8):
            logits = at_once(sequence)[-1:].numpy()
            sequence += sample(logits, params, seeds[row : row + 1], step).tolist()
        assert rows[row] == sequence[len(prompt) :]
    assert len({tuple(row) for row in rows}) == 3


def test_a_row_draws_in_a_batch_what_it_draws_alone() -> None:
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]

    def drawn(rows: list[list[int]], seed: int) -> list[list[int]]:
        params = SamplingParams(**DRAWN, seed=seed)  # type: ignore[arg-type]
        return run(Batch(hot(), len(rows)), rows, params, RowStops((), 12, [100] * len(rows)))

    together = drawn(prompts, 7)
    assert together == [drawn([prompt], 7 + row)[0] for row, prompt in enumerate(prompts)]
    assert together != drawn(prompts, 8)
