"""How a row ends: the union of end-of-text ids, limits, and rows on their own."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from onnxlm.errors import InputError, PackageError
from onnxlm.runtime.stopping import RowLimits, RowStops, eos_token_ids, read_eos_token_ids
from onnxlm.runtime.tokenizer import Tokenizer


def tokenizer(eos: str | None) -> Tokenizer:
    backend = Backend(models.WordLevel({f"t{i}": i for i in range(12)}))
    return Tokenizer(backend, {} if eos is None else {"eos_token": eos})


def package(folder: Path, config: object, generation: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "expected"),
    [
        (5, [5, 7], "t9", {5, 7, 9}),
        (5, None, None, {5}),
        (None, [7, 8], None, {7, 8}),
        (None, None, "t9", {9}),
        (None, None, None, set()),
        ([5, 6], 7, "t5", {5, 6, 7}),
        (0, [], "not in the vocabulary", {0}),
    ],
)
def test_union_of_three_files(
    tmp_path: Path, config: object, generation: object, eos_token: str | None, expected: set[int]
) -> None:
    folder = package(tmp_path, {"eos_token_id": config}, {"eos_token_id": generation})
    assert read_eos_token_ids(folder, tokenizer(eos_token)) == expected


def test_absent_files_and_fields_count_for_nothing(tmp_path: Path) -> None:
    assert read_eos_token_ids(tmp_path, tokenizer(None)) == frozenset()
    (tmp_path / "config.json").write_text("{}")
    assert read_eos_token_ids(tmp_path, tokenizer("t3")) == {3}
    assert read_eos_token_ids(tmp_path) == frozenset()


@pytest.mark.parametrize("value", ["2", [2, "3"], True, -1, 2.0, {"id": 2}, [[2]]])
def test_anything_but_ids_is_refused_with_its_file(tmp_path: Path, value: object) -> None:
    folder = package(tmp_path, {}, {"eos_token_id": value})
    with pytest.raises(InputError) as caught:
        read_eos_token_ids(folder)
    assert str(caught.value) == (
        f"generation_config.json: field 'eos_token_id'; found {value!r}; "
        "allowed: a token id, a list of token ids, or null"
    )
    with pytest.raises(InputError, match="somewhere: field 'eos_token_id'"):
        eos_token_ids({"fine": 1, "somewhere": value})


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(PackageError, match=r"config\.json"):
        read_eos_token_ids(tmp_path)


def row(room: int, max_new_tokens: int | None = None, eos: Collection[int] = ()) -> RowLimits:
    return RowLimits(room, max_new_tokens, eos)


def run(stops: RowStops, *steps: list[int]) -> list[str | None]:
    for step in steps:
        stops.update(np.array(step, dtype=np.int64))
    return list(stops.reasons)


def test_every_row_stops_on_its_own() -> None:
    stops = RowStops([row(room, 4, {5, 7, 9}) for room in (10, 10, 10, 2)])
    assert run(stops, [5, 1, 1, 1]) == ["eos", None, None, None]
    assert stops.running.tolist() == [False, True, True, True]
    assert run(stops, [1, 1, 1, 1]) == ["eos", None, None, "context"]
    assert run(stops, [1, 9, 1, 5]) == ["eos", "eos", None, "context"]
    assert run(stops, [1, 1, 1, 1]) == ["eos", "eos", "length", "context"]
    assert not stops.running.any()
    assert stops.counts.tolist() == [1, 3, 4, 2]


def test_every_row_has_limits_of_its_own() -> None:
    stops = RowStops(
        [row(10, 2, {5}), row(10, None, {6}), RowLimits(10, 4, {6}, stop_token_ids={5, 6})]
    )
    assert run(stops, [6, 5, 7]) == [None, None, None]
    assert run(stops, [6, 6, 5]) == ["length", "eos", "stop"]


def test_what_ends_a_text_is_no_stop_token() -> None:
    stops = RowStops([RowLimits(10, 4, {5}, stop_token_ids={5})])
    assert run(stops, [5]) == ["eos"]


@pytest.mark.parametrize(
    ("max_new_tokens", "room", "reason"),
    [(0, 5, "length"), (0, 0, "length"), (None, 0, "context"), (3, 0, "context"), (1, 1, None)],
)
def test_before_the_first_token(max_new_tokens: int | None, room: int, reason: str | None) -> None:
    assert RowStops([row(room, max_new_tokens, {1})]).reasons == [reason]


def test_which_reason_wins_at_the_last_token() -> None:
    assert run(RowStops([row(2, 2, {5})]), [1], [5]) == ["eos"]
    assert run(RowStops([row(2, 2, {5})]), [1], [1]) == ["length"]
    assert run(RowStops([row(2, None, {5})]), [1], [1]) == ["context"]
    assert run(RowStops([RowLimits(2, 2, (), {5})]), [1], [5]) == ["stop"]


@pytest.mark.parametrize(
    ("tokens", "before", "after"),
    [([1], None, "stop"), ([1, 1], "length", "stop"), ([5], "eos", "eos")],
)
def test_a_stop_string_ends_a_row(tokens: list[int], before: str | None, after: str) -> None:
    stops = RowStops([row(9, 2, {5}), row(9)])
    for token in tokens:
        stops.update([token, 1])
    assert stops.reasons == [before, None]
    stops.stop(0)
    assert stops.reasons == [after, None]


def test_without_eos_only_limits_stop() -> None:
    assert run(RowStops([row(100, 3)]), [0], [5]) == [None]
    assert run(RowStops([row(100, 3)]), [0], [5], [0]) == ["length"]
