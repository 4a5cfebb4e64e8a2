"""Stop strings in text that comes in pieces: found across them, and nothing else is lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxlm.runtime.row_text import StopMatcher


def pieces(text: Sequence[str], stops: Sequence[str]) -> list[str]:
    """What comes out for each piece, and at the end."""
    matcher = StopMatcher(stops)
    return [*map(matcher.push, text), matcher.finish()]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        (["a quick br", "own f", "ox jumps", "!"], ["own fox"], ["a quick br", "", "", "", ""]),
        (["Hi\n", "Us", "er: x"], ["\nUser:"], ["Hi", "", "", ""]),
        (["Hi\n", "Us", "e it", "."], ["\nUser:"], ["Hi", "", "\nUse it", ".", ""]),
        (["x", "ab", "c"], ["ab", "abc"], ["x", "", "", ""]),
        (["xabc"], ["ab", "abc"], ["x", ""]),
        (["abc", "d"], ["abcd", "bc"], ["a", "", ""]),
        (["abcd"], ["abcd", "bc"], ["a", ""]),
        (["aab"], ["ab"], ["a", ""]),
        (["aa", "ab", "x"], ["aab"], ["", "a", "", ""]),
        (["abab", "ac"], ["abac"], ["ab", "", ""]),
        (["so 🤗", "🤗 on"], ["🤗🤗"], ["so ", "", ""]),
        (["all of it"], ["all of it"], ["", ""]),
        (["all of"], ["all of it"], ["", "all of"]),
        (["one END two END"], ["END"], ["one ", ""]),
        (["nothing", "", "here"], ["x"], ["nothing", "", "here", ""]),
        (["nothing"], [], ["nothing", ""]),
    ],
)
def test_by_hand(text: list[str], stops: list[str], expected: list[str]) -> None:
    assert pieces(text, stops) == expected


def ended(text: str, stops: Sequence[str]) -> str:
    """What is left, by the definition: up to the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        done = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(done)]
    return text


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab🤗", max_size=14),
    stops=st.lists(st.text("ab🤗", min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(1, 13)),
)
def test_however_the_text_is_cut(text: str, stops: list[str], cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(edges)]
    expected = ended(text, stops)
    got = pieces(parts, stops)
    assert "".join(got) == expected
    seen = ""
    for count, piece in enumerate(got[:-1], 1):
        seen += piece
        # Nothing that a stop string may begin with has come out, and nothing else is held.
        so_far = text[: edges[count]]
        certain = [n for n in range(len(so_far) + 1) if is_certain(so_far, n, stops)]
        assert len(seen) == min(max(certain), len(expected))


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab🤗", max_size=14),
    stops=st.lists(st.text("ab🤗", min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 14),
)
def test_stop_strings_that_come_too_early_are_text(text: str, stops: list[str], least: int) -> None:
    """Only those count that are complete with a character behind the first `least`."""
    matcher = StopMatcher(stops)
    got = [matcher.push(letter, count >= least) for count, letter in enumerate(text)]
    ends = [
        (end, max(len(stop) for stop in stops if text[:end].endswith(stop)))
        for end in range(least + 1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    ]
    expected = text[: ends[0][0] - ends[0][1]] if ends else text
    assert "".join([*got, matcher.finish()]) == expected


def is_certain(text: str, count: int, stops: Sequence[str]) -> bool:
    """Whether no continuation can take back any of the first characters."""
    if ended(text, stops) != text:
        return count <= len(ended(text, stops))
    tails = (text[start:] for start in range(count))
    return not any(stop.startswith(tail) for tail in tails for stop in stops)
