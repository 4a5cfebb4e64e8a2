"""Caches of layers with a sliding window: they lose tokens, and nothing that is computed changes.

Against transformers, each row alone and at once, on rows that are several times as long as what is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.exported import variants
from support.hot import hot_model, oracle_logits, save_folder
from support.hot_packages import letter_tokenizer, new_folder
from support.parity import assert_logits_close
from transformers import PreTrainedModel

from onnxlm.export import export
from onnxlm.models.checkpoint.matching import outline
from onnxlm.models.config import ConfigReader
from onnxlm.models.registry import architecture_names, find_architecture
from onnxlm.runtime import LanguageModel, in_place_cache, load
from onnxlm.runtime.arrays import Floats, Ids
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.state_buffers import ROOM, tokens_kept

CONTEXT = 1280
# Every layer with a window, and one in two; the others go through the same where all is tested.
DEFAULT = ("mistral", "gemma3_text")


# By family, and of families that have one only where it is asked for, by family and variant.
CONFIGS = {
    family if variant == "tiny" else f"{family}, {variant}": config
    for family in architecture_names()
    for variant, config in variants(family).items()
}


def windows(family: str) -> list[int]:
    config = CONFIGS[family]
    architecture = find_architecture(config["model_type"])
    return outline(architecture, architecture.parse_config(ConfigReader(config, family))).windows


FORMS = [
    pytest.param(family, lowering, marks=() if family in DEFAULT else pytest.mark.exhaustive)
    for family in CONFIGS
    for lowering in ("ort", "portable")
    if any(windows(family))
]
every = pytest.mark.parametrize(("family", "lowering"), FORMS)
both = pytest.mark.parametrize("lowering", ["ort", "portable"])


@functools.cache
def oracle(family: str) -> PreTrainedModel:
    config = CONFIGS[family]
    longer = dict.fromkeys(config.keys() & {"max_position_embeddings", "n_positions"}, CONTEXT)
    return hot_model(config | longer)


@functools.cache
def model(family: str, lowering: str) -> LanguageModel:
    folder = save_folder(oracle(family), new_folder())
    letter_tokenizer().save(str(folder / "tokenizer.json"))
    return load(export(folder, new_folder() / "fp32", lowering=lowering).path, threads=1)


def new_batch(family: str, lowering: str, rows: int = 1) -> Batch:
    return Batch(model(family, lowering).sessions, rows)


def some_ids(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 90, length).tolist() for length in lengths]


def close(family: str, ours: Floats, ids: Sequence[int]) -> None:
    """Logits [n, V] are those behind the last n tokens."""
    theirs = oracle_logits(oracle(family), list(ids))[-len(ours) :]
    assert_logits_close(torch.from_numpy(np.ascontiguousarray(ours)), theirs)


def columns(batch: Batch, family: str) -> dict[bool, int]:
    """Most columns of the buffers of layers without a window, and with one."""
    found = {}
    for name, buffer in batch.cache.buffers.items():
        windowed = windows(family)[int(name.split(".")[1])] > 0
        found[windowed] = max(found.get(windowed, 0), buffer.shape()[2])
    return found


@every
def test_a_long_row_is_what_it_is_at_once(family: str, lowering: str) -> None:
    ids = some_ids(1100)[0]
    batch = new_batch(family, lowering)
    found = [batch.prefill_logits([ids[:700]])[0]]
    most = tokens_kept(max(windows(family))) + ROOM
    for token in ids[700:]:
        batch.set_tokens([token])
        found.append(batch.decode_logits()[0].copy())
        assert columns(batch, family)[True] <= most
    close(family, np.stack(found), ids)
    assert columns(batch, family).get(False, 1100) >= 1100
    assert batch.lengths.tolist() == [1100]


@every
def test_rows_of_all_lengths_are_what_they_are_alone(family: str, lowering: str) -> None:
    """Some end and go on later; more tokens come behind each, fewer of one than of another."""
    rows = some_ids(5, 430, 1000)
    more = some_ids(40, 300, 3)
    batch = new_batch(family, lowering, 3)
    found = [[logits] for logits in batch.prefill_logits(rows)]
    for step in range(30):
        live = np.array([True, step < 20, step % 3 == 0])
        batch.set_tokens([step + 7] * 3)
        logits = batch.decode_logits(live)
        for row in np.flatnonzero(live):
            rows[row].append(step + 7)
            found[row].append(logits[row].copy())
    for ours, row in zip(found, rows, strict=True):
        close(family, np.stack(ours), row)
    rows = [row + new for row, new in zip(rows, more, strict=True)]
    close_all(family, batch.prefill_logits(more), rows)
    assert batch.lengths.tolist() == list(map(len, rows))


def close_all(family: str, logits: Floats, rows: Sequence[Sequence[int]]) -> None:
    for own, row in zip(logits, rows, strict=True):
        close(family, own[None], row)


@both
def test_all_logits_of_one_call_longer_than_a_window(lowering: str) -> None:
    ids = some_ids(1100)[0]
    batch = new_batch("mistral", lowering)
    batch.prefill_tokens([ids[:500]])
    close("mistral", batch.prefill_all_logits(ids[500:]), ids)
    batch.set_tokens([3])
    close("mistral", batch.decode_logits(), [*ids, 3])


@both
@pytest.mark.parametrize("family", DEFAULT)
@pytest.mark.parametrize("back", [1, 40, 64, 65, 400])
def test_a_rewound_row_goes_on(family: str, lowering: str, back: int) -> None:
    """As far back as tokens are there it keeps what it holds; else it begins anew."""
    ids = some_ids(1000)[0]
    batch = new_batch(family, lowering)
    batch.prefill_tokens([ids])
    wanted = len(ids) - back
    kept = int(batch.rewind(wanted)[0])
    assert kept in (0, wanted)
    assert kept == wanted or back > 64
    assert batch.lengths.tolist() == [kept]
    ours = batch.prefill_logits([[*ids[kept:wanted], 5]])
    close(family, ours, [*ids[:wanted], 5])


@both
def test_rows_are_rewound_each_by_itself(lowering: str) -> None:
    rows = some_ids(900, 700, 6)
    batch = new_batch("gemma3_text", lowering, 3)
    batch.prefill_tokens(rows)
    wanted: Ids = np.array([890, 100, 2])
    kept = batch.rewind(wanted)
    # Of standard graphs' caches only columns are cut off that no row needs: the short one needs its own.
    assert kept.tolist() == [890, 0 if lowering == "ort" else 100, 2]
    rest = [row[start:end] for row, start, end in zip(rows, kept, wanted, strict=True)]
    ours = batch.prefill_logits([[*row, 5] for row in rest])
    close_all("gemma3_text", ours, [[*row[:end], 5] for row, end in zip(rows, wanted, strict=True)])


@both
def test_a_short_row_is_rewound_to_anything(lowering: str) -> None:
    ids = some_ids(tokens_kept(7))[0]
    for wanted in (0, 1, 6, 50):
        batch = new_batch("mistral", lowering)
        batch.prefill_tokens([ids])
        assert batch.rewind(wanted).tolist() == [wanted]
        close("mistral", batch.prefill_logits([[5]]), [*ids[:wanted], 5])


@both
@pytest.mark.parametrize("family", DEFAULT)
def test_forks_and_beams_go_on_alone(family: str, lowering: str) -> None:
    rows = some_ids(600, 20)
    batch = new_batch(family, lowering, 2)
    batch.prefill_tokens(rows)
    other = batch.fork()
    batch.reorder(np.array([1, 0, 0]))
    new = some_ids(300, 4, 280)
    own = [rows[1] + new[0], rows[0] + new[1], rows[0] + new[2]]
    close_all(family, batch.prefill_logits(new), own)
    batch.reorder(np.array([2, 0, 1]))
    batch.set_tokens([1, 2, 3])
    ours = batch.decode_logits()
    close_all(family, ours, [[*own[2], 1], [*own[0], 2], [*own[1], 3]])
    close_all(family, other.prefill_logits(new[:2]), [rows[0] + new[0], rows[1] + new[1]])


def test_an_interrupt_leaves_nothing_half_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(700)[0]
    batch = new_batch("mistral", "ort")
    batch.prefill_tokens([ids[:300]])
    moved = []

    def interrupted(*arguments: object) -> None:
        moved.append(arguments)
        if len(moved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(in_place_cache, "drop_first", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.prefill_tokens([ids[300:]])
    assert batch.lengths.tolist() == [0]
    close("mistral", batch.prefill_logits([ids]), ids)


@both
@pytest.mark.parametrize("family", DEFAULT)
def test_guesses_ahead_change_nothing(family: str, lowering: str) -> None:
    """They are run and undone across evictions."""
    prompt = some_ids(40)[0] * 12
    found = [
        model(family, lowering)
        .generate(prompt, max_new_tokens=400, min_new_tokens=400, prompt_lookup_num_tokens=count)
        .token_ids
        for count in (None, 8)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 400
