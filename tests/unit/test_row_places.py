"""Which row lies where: orders worked out by hand, and what must hold after any calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxlm.runtime.row_places import RowPlaces


@pytest.mark.parametrize(
    ("live", "moves", "rows"),
    [
        ([True, True, True], None, [0, 1, 2]),
        ([True, True, False], None, [0, 1, 2]),
        ([False, True, True], [2, 1, 0], [2, 1, 0]),
        ([False, False, True], [2, 1, 0], [2, 1, 0]),
        ([False, False, False], None, [0, 1, 2]),
    ],
)
def test_only_rows_that_must_move_do(
    live: list[bool], moves: list[int] | None, rows: list[int]
) -> None:
    places = RowPlaces(3)
    found = places.arrange(live)
    assert (None if found is None else found.tolist()) == moves
    assert places.rows.tolist() == rows
    assert places.running == sum(live)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), max_size=6))
def test_what_lies_in_the_places_is_found_by_row(calls: list[list[bool]]) -> None:
    """An array that is moved as told holds row r's number at row r's place."""
    places, held = RowPlaces(5), np.arange(5)
    for live in calls:
        moves = places.arrange(live)
        if moves is not None:
            held = held[moves]
        assert {row for row in range(5) if live[row]} == set(held[: places.running].tolist())
        assert places.rows.tolist() == held.tolist()
        assert places.by_row(held).tolist() == list(range(5))
        assert list(places.by_place(range(5))) == held.tolist()
        assert held[places.places].tolist() == list(range(5))


def test_what_no_row_has_left_is_not_copied() -> None:
    array = np.arange(3)
    assert RowPlaces(3).by_row(array) is array
