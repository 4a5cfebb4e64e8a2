"""Windows of a text: each token predicted once, with as much before it as was promised."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxlm.errors import InputError
from onnxlm.runtime.text_windows import strided_windows

BOS = 1000


def test_worked_by_hand() -> None:
    """Seven tokens, four at a time, two apart: 1-4, then 5 and 6 from at least three before them."""
    rows = strided_windows(range(7), [], window=4, stride=2)
    assert [(row.ids, row.first, row.scored) for row in rows] == [
        ([0, 1, 2, 3, 4], 0, 4),
        ([2, 3, 4, 5, 6], 2, 2),
    ]
    rows = strided_windows(range(4), [BOS], window=3, stride=1)
    assert [(row.ids, row.first) for row in rows] == [([BOS, 0, 1, 2], 0), ([BOS, 1, 2, 3], 2)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_each_token_once_with_enough_before_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 60))
    before = data.draw(st.sampled_from([[], [BOS]]))
    window = data.draw(st.integers(len(before) + 1, 70))
    stride = data.draw(st.integers(1, window - len(before)))
    predicted = []
    for number, row in enumerate(strided_windows(range(count), before, window, stride)):
        assert len(row.ids) - 1 <= window
        assert row.ids[: len(before)] == before
        text = row.ids[len(before) :]
        assert text == list(range(text[0], text[0] + len(text)))
        assert row.scored >= 1
        for position in range(row.first, len(row.ids) - 1):
            predicted.append(row.ids[position + 1])
            assert number == 0 or position + 1 > window - stride
    assert predicted == list(range(0 if before else 1, count))


@pytest.mark.parametrize(
    ("count", "before", "window", "stride", "shown"),
    [
        (1, [BOS], 8, 4, "the evaluation text is too short; found 1 tokens; allowed: 2 or more"),
        (9, [BOS], 1, 1, "the window; found 1; allowed: 2 or more"),
        (9, [BOS], 8, 8, "the stride; found 8; allowed: 1 to 7"),
        (9, [], 8, 0, "the stride; found 0; allowed: 1 to 8"),
    ],
)
def test_bounds(count: int, before: list[int], window: int, stride: int, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        strided_windows(range(count), before, window, stride)
    assert str(caught.value) == shown
