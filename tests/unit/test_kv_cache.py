"""Caches: which columns hold tokens, and buffers that grow; masks and sizes are worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from onnxlm.io_spec import StateSpec
from onnxlm.runtime.append_cache import AppendCache
from onnxlm.runtime.device_buffers import Device
from onnxlm.runtime.in_place_cache import InPlaceCache
from onnxlm.runtime.kv_cache import KVCache, new_cache
from onnxlm.runtime.state_buffers import bytes_at

CPU = Device()
CONTEXT = 1000
HEADS, WIDTH = 2, 4


def states(update: str, dtype: str = "float32") -> tuple[StateSpec, ...]:
    shape = ("batch_size", HEADS, "past_sequence_length", WIDTH)
    names = [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.0.value", "present.0.value"),
    ]
    return tuple(StateSpec(past, present, dtype, shape, update) for past, present in names)


def flags(*rows: str) -> NDArray[np.bool_]:
    return np.array([[mark == "1" for mark in row] for row in rows])


def spelled(mask: NDArray[np.int64]) -> list[str]:
    assert mask.dtype == np.int64
    return ["".join(map(str, row)) for row in mask.tolist()]


class Outputs:
    """Stands for an IOBinding that has run: first output, then a present a state."""

    def __init__(self, *presents: NDArray[Any]) -> None:
        logits = np.zeros(1, dtype=np.float32)
        self._values = [ort.OrtValue.ortvalue_from_numpy(a) for a in (logits, *presents)]

    def get_outputs(self) -> list[ort.OrtValue]:
        return self._values


def in_place(*lengths: int, context: int = CONTEXT) -> InPlaceCache:
    """A cache whose rows hold so many tokens."""
    cache = InPlaceCache(states("in_place"), len(lengths), context, CPU)
    hold(cache, lengths)
    return cache


def hold(cache: InPlaceCache, lengths: Sequence[int]) -> None:
    """Have an empty cache take a call of so many tokens a row."""
    if any(lengths):
        real = np.arange(max(lengths)) < np.array(lengths)[:, None]
        if not cache.fits(real.shape[1], 1):
            cache.grow(real.shape[1], 1)
        cache.chunk_mask(real)
        cache.commit(Outputs())


def append(*masks: str) -> AppendCache:
    """A cache whose column c holds the number c."""
    cache = AppendCache(states("append"), len(masks), CPU)
    columns = np.arange(len(masks[0]), dtype=np.float32)[:, None]
    present = np.broadcast_to(columns, (len(masks), HEADS, len(masks[0]), WIDTH)).copy()
    cache.chunk_mask(flags(*masks))
    cache.commit(Outputs(present, present.copy()))
    return cache


@pytest.mark.parametrize(("update", "kind"), [("in_place", InPlaceCache), ("append", AppendCache)])
def test_the_states_choose_the_kind(update: str, kind: type) -> None:
    cache = new_cache(states(update), 3, CONTEXT, CPU)
    assert isinstance(cache, kind)
    assert cache.lengths.tolist() == [0, 0, 0]
    assert cache.nbytes == 0
    shapes = [buffer.shape() for buffer in cache.buffers.values()]
    assert shapes == [[3, HEADS, 0, WIDTH]] * 2


def test_bytes() -> None:
    assert bytes_at(states("append"), 3, 10) == 2 * 3 * HEADS * 10 * WIDTH * 4
    assert bytes_at(states("append", "float16"), 3, 10) == 2 * 3 * HEADS * 10 * WIDTH * 2
    cache = in_place(0, 0, 0)
    cache.grow(10, 1)
    assert cache.nbytes == bytes_at(states("append"), 3, 256)
    assert append("110", "001").nbytes == bytes_at(states("append"), 2, 3)


@pytest.mark.parametrize(
    ("asked", "capacities"),
    [
        ([1, 257, 513], [256, 512, 768]),
        ([256, 300], [256, 512]),
        ([700, 769], [768, CONTEXT]),  # 1,152 by half, and the context is shorter
        ([999], [CONTEXT]),
    ],
)
def test_room_grows_in_steps_up_to_the_context(asked: list[int], capacities: list[int]) -> None:
    cache = in_place(0)
    for columns, capacity in zip(asked, capacities, strict=True):
        assert not cache.fits(columns, 1)
        cache.grow(columns, 1)
        assert cache.capacity == capacity
        assert cache.fits(capacity, 1)
        assert cache.fits(capacity + 1, 1) == (capacity == CONTEXT)  # no row can be longer
        assert {tuple(b.shape()) for b in cache.buffers.values()} == {(1, HEADS, capacity, WIDTH)}


def test_room_is_for_what_is_held_and_what_is_new() -> None:
    cache = in_place(250, 3)
    assert cache.fits(6, 1)
    assert not cache.fits(7, 1)
    cache.grow(7, 1)
    assert cache.capacity == 512


def test_room_grows_by_half() -> None:
    cache = in_place(0, context=100_000)
    for columns, capacity in ((2048, 2048), (2049, 3072), (3073, 4608), (4609, 6912)):
        cache.grow(columns, 1)
        assert cache.capacity == capacity


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_growth_keeps_what_is_cached_and_zeroes_the_rest(dtype: str) -> None:
    cache = InPlaceCache(states("in_place", dtype), 2, CONTEXT, CPU)
    cache.grow(1, 1)
    values = {}
    for index, (name, buffer) in enumerate(cache.buffers.items()):
        array = buffer.numpy()
        assert array.dtype == np.dtype(dtype)
        array[:] = np.random.default_rng(index).normal(size=array.shape)
        values[name] = array.copy()
    hold(cache, [3, 200])
    cache.grow(57, 1)
    for name, buffer in cache.buffers.items():
        array = buffer.numpy()
        assert array.shape == (2, HEADS, 512, WIDTH)
        np.testing.assert_array_equal(array[:, :, :200], values[name][:, :, :200])
        assert not array[:, :, 200:].any()


def test_masks_in_place_hold_no_padding_of_earlier_calls() -> None:
    cache = in_place(3, 1)
    assert spelled(cache.chunk_mask(flags("1100", "1111"))) == ["1111100", "1001111"]
    cache.commit(Outputs())
    assert cache.lengths.tolist() == [5, 5]


def test_the_mask_of_a_step_is_as_wide_as_the_buffers() -> None:
    """Each row's column is the one behind its end; the array stays the same until something else happens."""
    cache = in_place(3, 1, context=6)
    first = cache.step_mask([1, 1])
    assert spelled(first) == ["111100", "110000"]
    cache.commit(Outputs())
    second = cache.step_mask([1, 1])
    assert second is first
    assert spelled(second) == ["111110", "111000"]
    cache.commit(Outputs())
    assert cache.lengths.tolist() == [5, 3]
    cache.rewind(np.array([2, 3]))
    third = cache.step_mask([1, 1])
    assert third is not second
    assert spelled(third) == ["111000", "111100"]
    cache.commit(Outputs())
    cache.chunk_mask(flags("11", "10"))
    cache.commit(Outputs())
    assert spelled(cache.step_mask([1, 1])) == ["111111", "111111"]


def test_a_step_after_growth_has_a_wider_mask() -> None:
    cache = in_place(256, 2)
    assert not cache.fits(1, 1)
    cache.grow(1, 1)
    mask = cache.step_mask([1, 1])
    assert mask.shape == (2, 512)
    assert mask.sum(axis=1).tolist() == [257, 3]


def test_a_call_that_is_not_committed_counts_for_nothing() -> None:
    cache = in_place(3, 1, context=8)
    cache.step_mask([1, 1])
    cache.chunk_mask(flags("111", "100"))
    assert cache.lengths.tolist() == [3, 1]
    assert spelled(cache.step_mask([1, 1])) == ["11110000", "11000000"]


def test_an_idle_row_of_a_chunk_makes_the_mask_no_wider() -> None:
    """The kernel's rotary table ends at the context limit, and the idle row may have reached it."""
    cache = in_place(CONTEXT, 1)
    real = flags("000", "111")
    assert cache.room(real.any(axis=1)) == CONTEXT - 1
    assert spelled(cache.chunk_mask(real)) == ["1000", "1111"]
    cache.commit(Outputs())
    assert cache.lengths.tolist() == [CONTEXT, 4]


def test_a_step_leaves_what_an_idle_row_holds() -> None:
    """Such a row's column is the free one behind its end, and is not counted."""
    cache = in_place(2, 1, context=5)
    for second in ("11000", "11100"):
        assert spelled(cache.step_mask([0, 1])) == ["11100", second]
        cache.commit(Outputs())
    assert cache.lengths.tolist() == [2, 3]
    assert spelled(cache.step_mask([1, 0])) == ["11100", "11110"]
    cache.commit(Outputs())
    assert cache.lengths.tolist() == [3, 3]


def test_an_idle_row_at_the_end_of_the_context_gives_up_a_column() -> None:
    cache = in_place(5, 1, context=5)
    assert spelled(cache.step_mask([0, 1])) == ["11111", "11000"]
    cache.commit(Outputs())
    assert cache.lengths.tolist() == [4, 2]


@pytest.mark.parametrize("cache", [in_place(3, 9, 5), append("111000000", "1" * 9, "110011100")])
def test_the_longest_row_of_those_that_grow(cache: KVCache) -> None:
    assert cache.longest([1, 1, 1]) == 10
    assert cache.longest([4, 0, 1]) == 7
    assert cache.longest([0, 0, 0]) == 0


def test_masks_of_appended_columns_hold_all_padding() -> None:
    cache = append("1110", "1000")
    assert cache.lengths.tolist() == [3, 1]
    assert spelled(cache.chunk_mask(flags("10", "11"))) == ["111010", "100011"]
    assert spelled(cache.step_mask([0, 1])) == ["11100", "10001"]
    assert not cache.fits(1, 1)


def test_appended_presents_are_the_next_pasts() -> None:
    cache = append("11", "10")
    key, value = (np.full((2, HEADS, 3, WIDTH), number, dtype=np.float32) for number in (1, 2))
    cache.chunk_mask(flags("0", "1"))
    assert cache.lengths.tolist() == [2, 1]
    cache.commit(Outputs(key, value))
    assert cache.lengths.tolist() == [2, 2]
    assert [buffer.numpy().max() for buffer in cache.buffers.values()] == [1, 2]


def test_rewinding_in_place_only_counts_less() -> None:
    cache = in_place(5, 9)
    before = dict(cache.buffers)
    cache.rewind(np.array([5, 2]))
    assert cache.lengths.tolist() == [5, 2]
    assert cache.buffers == before
    assert spelled(cache.chunk_mask(flags("1", "1"))) == ["111111", "110001"]


@pytest.mark.parametrize(
    ("lengths", "mask"),
    [
        ([3, 3], ["1011", "0111"]),  # nothing to forget
        ([1, 3], ["1000", "0111"]),  # a later column still holds the other row's token
        ([2, 1], ["101", "010"]),  # the last column is padding in both
        ([1, 0], ["1", "0"]),
        ([0, 0], ["", ""]),
    ],
)
def test_rewinding_appended_columns(lengths: list[int], mask: list[str]) -> None:
    cache = append("1011", "0111")
    cache.rewind(np.array(lengths))
    assert cache.lengths.tolist() == lengths
    assert spelled(cache.chunk_mask(flags("1", "1"))) == [row + "1" for row in mask]
    for buffer in cache.buffers.values():
        array = buffer.numpy()
        assert array.flags.c_contiguous
        assert array[1, 1, :, 0].tolist() == list(range(len(mask[0])))
