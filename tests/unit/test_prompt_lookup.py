"""Guesses from what a row has said before: by hand, and against a search through the whole row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxlm.runtime.prompt_lookup import LONGEST_MATCH, NGRAM, Draft, RowDrafts


@pytest.mark.parametrize(
    ("ids", "count", "draft"),
    [
        ([], 4, None),
        ([1], 4, None),
        ([1, 2, 3, 1], 4, None),  # one token alone says nothing
        ([1, 2, 3, 4, 1, 2], 1, Draft([3], 2)),
        ([1, 2, 3, 4, 1, 2], 2, Draft([3, 4], 2)),
        ([1, 2, 3, 4, 1, 2], 0, None),
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, Draft([8, 1], 2)),  # the latest, not the first
        ([9, 1, 2, 3, 5, 9, 1, 2], 1, Draft([3], 3)),
        ([8, 1, 2, 3, 5, 9, 1, 2], 1, Draft([3], 2)),
        ([1, 2, 1, 2], 5, Draft([1, 2, 1, 2, 1], 2)),  # goes on in its period
        ([4, 4, 4], 3, Draft([4, 4, 4], 2)),
    ],
)
def test_by_hand(ids: list[int], count: int, draft: Draft | None) -> None:
    assert RowDrafts(ids).draft(count) == draft


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6))
def test_as_a_search_finds_it(ids: list[int], count: int) -> None:
    ends = [
        end for end in range(NGRAM, len(ids)) if ids[end - NGRAM : end] == ids[len(ids) - NGRAM :]
    ]
    found = RowDrafts(ids).draft(count)
    if not ends:
        assert found is None
        return
    end = ends[-1]
    going_on = list(ids)
    while len(going_on) < len(ids) + count:
        going_on.append(going_on[end + len(going_on) - len(ids)])
    assert found is not None
    assert found.ids == going_on[len(ids) :]
    matches = [m for m in range(1, end + 1) if ids[end - m : end] == ids[len(ids) - m :]]
    assert found.match == min(max(matches), LONGEST_MATCH)


def test_a_copy_goes_on_by_itself() -> None:
    row = RowDrafts([1, 2, 3, 1])
    other = row.copy()
    row.append(2)
    assert (len(row), len(other)) == (5, 4)
    assert row.draft(1) == Draft([3], 2)
    assert other.draft(1) is None
    other.append(3)
    assert other.draft(1) is None
