"""Exported graphs against transformers in fp32 with the same weights, at every position.

Parametrized over families, variants of their tiny config, lowerings, and ONNX Runtime's own optimizer off
and on: a new file in `models/architectures` or `export/lowerings` is tested without a change here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from parity.tolerances import tolerance
from support.exported import Exported, Past, Runner, exported, oracle
from support.hot import oracle_logits
from support.matrix import exports, half_exports
from support.parity import assert_logits_close
from torch import Tensor

from onnxlm import io_spec

TOKENS = [(37 * position + 11) % 89 for position in range(64)]
PROMPT = TOKENS[:12]


def close(ours: Tensor, theirs: Tensor, dtype: str = "float32") -> None:
    assert_logits_close(ours, theirs, tolerance("graph", dtype))


@pytest.fixture(params=exports())
def case(request: pytest.FixtureRequest) -> Exported:
    return exported(*request.param)


@pytest.fixture(params=[False, True], ids=["as written", "optimized"])
def runner(request: pytest.FixtureRequest, case: Exported) -> Runner:
    return case.runner(request.param)


def test_prompt_at_once(case: Exported, runner: Runner) -> None:
    logits, _ = runner.run([PROMPT], runner.empty(), keep=len(PROMPT))
    close(logits[0], case.oracle_logits(PROMPT))


def test_one_row_of_logits_by_default(case: Exported, runner: Runner) -> None:
    logits, _ = runner.run([PROMPT], runner.empty())
    close(logits[0], case.oracle_logits(PROMPT)[-1:])


@pytest.mark.parametrize("chunks", [(5, 1, 6), (1,) * 12, (11, 1)], ids=str)
def test_chunks(case: Exported, runner: Runner, chunks: tuple[int, ...]) -> None:
    past, parts = runner.empty(), []
    for chunk in torch.tensor(PROMPT).split(list(chunks)):
        logits, past = runner.run(chunk[None], past, keep=len(chunk))
        parts.append(logits[0])
    close(torch.cat(parts), case.oracle_logits(PROMPT))


def test_decode(case: Exported, runner: Runner) -> None:
    """32 steps, teacher-forced: across the 16 positions that scaled rotary tables were trained for."""
    whole = case.oracle_logits(TOKENS[:40])
    logits, past = runner.run([TOKENS[:8]], runner.empty())
    for position in range(8, 40):
        close(logits[0], whole[position - 1 : position])
        logits, past = runner.step([TOKENS[position]], past)
    close(logits[0], whole[-1:])


def test_decode_from_nothing(case: Exported, runner: Runner) -> None:
    """A prompt of one token may go to the decode graph."""
    logits, past = runner.step(PROMPT[:1], runner.empty())
    close(logits[0], case.oracle_logits(PROMPT[:1]))
    logits, _ = runner.step(PROMPT[1:2], past)
    close(logits[0], case.oracle_logits(PROMPT[:2])[-1:])


class Rows:
    """A batch whose rows are known alone: what was fed to each, and the mask of every column."""

    def __init__(self, case: Exported, runner: Runner, past: Past) -> None:
        self.case, self.runner, self.past = case, runner, past
        self.rows: list[list[int]] = [[] for _ in next(iter(past.values()))]
        self.mask = np.zeros((len(self.rows), 0), dtype=np.int64)

    def extend(self, parts: list[list[int]], side: str = "right") -> None:
        """Run a chunk, padded on one side, and compare each row's last logits with the row alone."""
        width = max(map(len, parts))
        ids = np.full((len(parts), width), 1, dtype=np.int64)
        new = np.zeros_like(ids)
        for i, part in enumerate(parts):
            columns = slice(len(part)) if side == "right" else slice(width - len(part), width)
            ids[i, columns], new[i, columns] = part, 1
        self._call(self.runner.run, ids, new, parts)

    def step(self, tokens: list[int]) -> None:
        new = np.ones((len(tokens), 1), dtype=np.int64)
        self._call(self.runner.step, np.array(tokens), new, [[token] for token in tokens])

    def _call(
        self,
        graph: Callable[..., tuple[Tensor, Past]],
        ids: NDArray[np.int64],
        new: NDArray[np.int64],
        parts: list[list[int]],
    ) -> None:
        self.mask = np.concatenate((self.mask, new), axis=1)
        logits, self.past = graph(ids, self.past, self.mask)
        for i, part in enumerate(parts):
            self.rows[i] += part
            if part:
                close(logits[i], self.case.oracle_logits(self.rows[i])[-1:])


STARTS = [TOKENS[:3], TOKENS[20:27], TOKENS[40:51]]
FOLLOW_UPS = [TOKENS[50:54], TOKENS[3:4], TOKENS[9:11]]
STEPS = [[5, 70, 31], [2, 2, 88], [44, 9, 0]]


def test_ragged_batch(case: Exported, runner: Runner) -> None:
    """Rows of 3, 7 and 11 tokens, then 4, 1 and 2 more behind their ragged pasts, then steps."""
    batch = Rows(case, runner, runner.empty(len(STARTS)))
    batch.extend(STARTS)
    batch.extend(FOLLOW_UPS)
    for tokens in STEPS:
        batch.step(tokens)
    batch.extend(FOLLOW_UPS)


def test_row_that_has_nothing_new(case: Exported, runner: Runner) -> None:
    """A chunk of a long prompt reaches its batch after the short rows have ended."""
    batch = Rows(case, runner, runner.empty(len(STARTS)))
    batch.extend(STARTS)
    batch.extend([[], TOKENS[5:9], []])
    batch.extend(FOLLOW_UPS)
    batch.step(STEPS[0])


@pytest.mark.parametrize("case", exports("append"), indirect=True)
def test_append_takes_padding_anywhere(case: Exported, runner: Runner) -> None:
    batch = Rows(case, runner, runner.empty(len(STARTS)))
    batch.extend(STARTS, side="left")
    batch.extend(FOLLOW_UPS, side="right")
    batch.step(STEPS[0])
    batch.extend(FOLLOW_UPS, side="left")
    batch.step(STEPS[1])


IN_PLACE = pytest.mark.parametrize("case", exports("in_place"), indirect=True)


def leftovers(runner: Runner) -> float:
    """What lies in columns without a token: anything; in a cache with a twin, any number.

    The decode graph multiplies such a cache by shares, 0 behind a row's length (`passes/latent_step.py`), and
    0 * NaN is NaN. Clearing those columns first would copy the whole cache in every layer and step; the
    runtime's buffers are made of zeros instead.
    """
    outputs = {value.name for value in runner.decode.get_outputs()}
    twins = {io_spec.twin_of(io_spec.present_of(name)) for name in runner.states}
    return 1e4 if outputs & twins else np.nan


@IN_PLACE
def test_room_behind_the_cache(case: Exported, runner: Runner) -> None:
    """A past of more columns than the mask: the rest is room, whatever lies in it."""
    batch = Rows(case, runner, runner.empty(len(STARTS), columns=32, fill=leftovers(runner)))
    batch.extend(STARTS)
    batch.extend(FOLLOW_UPS)
    for tokens in STEPS:
        batch.step(tokens)
    assert {value.shape[2] for value in batch.past.values()} == {32}


class BoundBuffers(Runner):
    """Past and present are one buffer, bound once."""

    def __init__(self, runner: Runner, rows: int, columns: int) -> None:
        self.prefill, self.decode, self.states = runner.prefill, runner.decode, runner.states
        self.buffers = {
            name: ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in runner.empty(rows, columns, fill=leftovers(runner)).items()
        }

    def _call(
        self, session: ort.InferenceSession, feeds: dict[str, NDArray[Any]]
    ) -> tuple[Tensor, Past]:
        binding = session.io_binding()
        for name, value in feeds.items():
            if name not in self.buffers:
                binding.bind_cpu_input(name, np.ascontiguousarray(value))
        for name, buffer in self.buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(io_spec.present_of(name), buffer)
        binding.bind_output(io_spec.LOGITS, "cpu")
        session.run_with_iobinding(binding)
        logits = binding.get_outputs()[-1].numpy().copy()
        return torch.from_numpy(logits), {n: b.numpy() for n, b in self.buffers.items()}


@IN_PLACE
def test_one_buffer_for_past_and_present(case: Exported, runner: Runner) -> None:
    bound = BoundBuffers(runner, rows=len(STARTS), columns=32)
    addresses = {name: buffer.data_ptr() for name, buffer in bound.buffers.items()}
    batch = Rows(case, bound, {n: b.numpy() for n, b in bound.buffers.items()})
    batch.extend(STARTS)
    batch.extend(FOLLOW_UPS)
    for tokens in STEPS:
        batch.step(tokens)
    assert {name: buffer.data_ptr() for name, buffer in bound.buffers.items()} == addresses
    for name, buffer in bound.buffers.items():
        for row, tokens in enumerate(batch.rows):
            untouched = np.isclose(buffer.numpy()[row], leftovers(runner), rtol=0, equal_nan=True)
            columns = ~untouched.any(axis=(0, 2))
            assert columns[: len(tokens)].all(), name
            assert not columns[batch.mask.shape[1] :].any(), name


@pytest.mark.parametrize("key", half_exports())
def test_half_precision(key: tuple[str, str]) -> None:
    """Graphs of a model in fp16: fp16 caches, fp32 logits, close to the fp32 model."""
    family, lowering = key
    case = exported(family, "tiny", lowering, torch.float16)
    for session in (case.runner().prefill, case.runner().decode):
        types = {value.name: value.type for value in session.get_inputs() + session.get_outputs()}
        caches = {kind for name, kind in types.items() if name.startswith(io_spec.PAST_PREFIX)}
        assert caches == {"tensor(float16)"}
        assert types[io_spec.LOGITS] == "tensor(float)"
    whole = oracle_logits(oracle(family), TOKENS[:20])
    for optimized in (False, True):
        runner = case.runner(optimized)
        logits, past = runner.run([PROMPT], runner.empty(), keep=len(PROMPT))
        close(logits[0], whole[: len(PROMPT)], "float16")
        for position in range(len(PROMPT), 20):
            logits, past = runner.step([TOKENS[position]], past)
            close(logits[0], whole[position : position + 1], "float16")


def test_weights_are_hot_enough_to_show_faults(case: Exported) -> None:
    """One token fewer, or another one, moves logits far beyond the tolerance, whatever scales them."""
    last = case.oracle_logits(PROMPT)[-1]
    for other in (PROMPT[1:], [*PROMPT[:5], 1, *PROMPT[6:]]):
        change = (case.oracle_logits(other)[-1] - last).abs().max()
        largest = last.abs().max().item()
        assert change > max(0.1, 200 * tolerance("graph", "float32") * largest)
