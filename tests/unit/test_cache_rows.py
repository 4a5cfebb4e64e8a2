"""Rows of a batch that change places: each goes on as the row it was, run alone and at once."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from support.batches import assert_behind, both, hot, prefilled, some_ids

from onnxlm.io_spec import StateSpec
from onnxlm.runtime.cache_rows import reordered
from onnxlm.runtime.device_buffers import Device

CPU = Device()
SHAPE = ("batch_size", 2, "past_sequence_length", 3)
STATE = StateSpec("past_key_values.0.key", "present.0.key", "float32", SHAPE, "in_place")


@both
@pytest.mark.parametrize(
    "order", [[0, 1, 2], [2, 0, 1], [1, 1, 0], [0, 0, 0], [2], [0, 0, 1, 1, 2, 2]]
)
def test_rows_go_on_from_where_they_come(lowering: str, order: list[int]) -> None:
    prompts = some_ids(3, 9, 6)
    batch = prefilled(hot(lowering), prompts)
    batch.set_tokens([1, 2, 3])
    batch.decode_logits()  # what is bound by now holds the old buffers
    rows = [[*prompt, token] for prompt, token in zip(prompts, (1, 2, 3), strict=True)]
    batch.reorder(np.array(order))
    rows = [list(rows[source]) for source in order]
    assert batch.lengths.tolist() == [len(row) for row in rows]
    for step in range(3):
        tokens = [10 + step + 7 * row for row in range(len(rows))]
        batch.set_tokens(tokens)
        rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
        assert_behind(batch.decode_logits(), rows)
    more = some_ids(*(2 + row for row in range(len(rows))))
    assert_behind(batch.prefill_logits(more), [a + b for a, b in zip(rows, more, strict=True)])


def filled(rows: int, columns: int) -> NDArray[np.float32]:
    """Row r holds r + 1 everywhere."""
    sizes = (rows, 2, columns, 3)
    return np.broadcast_to(np.arange(1, rows + 1)[:, None, None, None], sizes).astype(np.float32)


@pytest.mark.parametrize(
    ("order", "held"),
    [([0, 1, 2], [1, 2, 3]), ([1, 2, 0], [2, 3, 1]), ([1, 0, 1], [2, 1, 2]), ([2, 2, 2], [3] * 3)],
)
def test_rows_move_within_their_buffer_and_only_used_columns_do(
    order: list[int], held: list[int]
) -> None:
    buffer = ort.OrtValue.ortvalue_from_numpy(filled(3, 5))
    assert reordered(buffer, STATE, np.array(order), 4, CPU) is buffer
    array = buffer.numpy()
    assert array[:, 1, :4, 2].tolist() == [[number] * 4 for number in held]
    assert array[:, 1, 4, 2].tolist() == [1, 2, 3]


def test_more_or_fewer_rows_are_a_new_buffer_whose_rest_is_zero() -> None:
    buffer = ort.OrtValue.ortvalue_from_numpy(filled(2, 5))
    for order in ([1, 0, 1, 1], [1]):
        new = reordered(buffer, STATE, np.array(order), 3, CPU).numpy()
        assert new.shape == (len(order), 2, 5, 3)
        assert new[:, 0, 0, 0].tolist() == [source + 1 for source in order]
        assert not new[:, :, 3:].any()
    assert buffer.numpy()[:, 0, 0, 0].tolist() == [1, 2]
