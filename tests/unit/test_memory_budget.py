"""Bytes that a cache may take: sizes worked out by hand, files as Linux writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.batches import both, hot, some_ids

from onnxlm.errors import InputError
from onnxlm.runtime import memory_budget
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.memory_budget import affordable, available_memory, read_bytes
from onnxlm.runtime.state_buffers import bytes_at


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (None, None),
        (4096, 4096),
        ("4096", 4096),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("1.5GiB", 3 * 2**29),
        ("2k", 2000),
        ("3KiB", 3072),
        ("1G", 10**9),
    ],
)
def test_numbers_of_bytes(text: str | int | None, count: int | None) -> None:
    assert read_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "0", 0, -5, "-5MB", "12 parsecs", "1,000", "nan", True])
def test_what_is_no_number_of_bytes(text: str | int) -> None:
    with pytest.raises(InputError, match=r"^kv_budget; found .*; allowed: a number of bytes above"):
        read_bytes(text)


def ten_a_column(columns: int) -> int:
    return 10 * columns


@pytest.mark.parametrize(
    ("budget", "columns"), [(5120, 512), (9999, 512), (5119, 511), (3000, 300), (3009, 300)]
)
def test_as_many_columns_as_the_budget_allows(budget: int, columns: int) -> None:
    assert affordable(ten_a_column, 300, 512, budget) == columns


def test_what_is_needed_and_does_not_fit() -> None:
    message = (
        r"^the key and value cache has no room for 300 columns; found 3,000 bytes needed; "
        r"allowed: 2,999 bytes \(kv_budget\); shorten the prompt, .*--kv-budget$"
    )
    with pytest.raises(InputError, match=message):
        affordable(ten_a_column, 300, 512, 2999)


def test_without_a_budget_what_is_free_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held already is given back, so it can be used again."""
    monkeypatch.setattr(memory_budget, "available_memory", lambda: 3500)
    assert affordable(ten_a_column, 300, 512, None, held=1000) == 450
    with pytest.raises(InputError, match=r"allowed: 3,500 bytes \(memory that is free\)"):
        affordable(ten_a_column, 351, 512, None)
    monkeypatch.setattr(memory_budget, "available_memory", lambda: None)
    assert affordable(ten_a_column, 10**9, 10**10, None) == 10**10


def test_what_is_free_here_says_nothing_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that was given is kept there too."""
    monkeypatch.setattr(memory_budget, "available_memory", lambda: 0)
    assert affordable(ten_a_column, 300, 512, None, on_host=False) == 512
    assert affordable(ten_a_column, 300, 512, 3009, on_host=False) == 300
    with pytest.raises(InputError, match=r"allowed: 2,999 bytes \(kv_budget\)"):
        affordable(ten_a_column, 300, 512, 2999, on_host=False)


def linux(folder: Path, available_kb: int, **container: str) -> tuple[Path, Path]:
    (folder / "meminfo").write_text(
        f"MemTotal:       16000000 kB\nMemAvailable:   {available_kb} kB\n", encoding="ascii"
    )
    for name, text in container.items():
        (folder / f"memory.{name}").write_text(text, encoding="ascii")
    return folder, folder


def test_what_the_machine_has_left(tmp_path: Path) -> None:
    assert available_memory(*linux(tmp_path, 5000)) == 5000 * 1024


def test_what_a_container_has_left(tmp_path: Path) -> None:
    """Of 4,000,000 bytes 1,500,000 are in use, 300,000 of them pages of files."""
    stat = "anon 1200000\nfile 300000\nfile_mapped 5\n"
    folders = linux(tmp_path, 5000, max="4000000\n", current="1500000\n", stat=stat)
    assert available_memory(*folders) == 2_800_000
    assert available_memory(*linux(tmp_path, 1000)) == 1000 * 1024


def test_a_container_without_a_limit_or_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_memory(*linux(tmp_path, 7, max="max\n", current="1", stat="")) == 7 * 1024
    assert available_memory(tmp_path / "no", tmp_path / "no") is None


@both
def test_a_batch_keeps_to_its_budget(lowering: str) -> None:
    """300 columns of 2 rows are allowed: as many are held, the next is refused, and the batch goes on."""
    sessions = hot(lowering)
    budget = bytes_at(sessions.states, 2, 300)
    batch = Batch(dataclasses.replace(sessions, kv_budget=budget), 2)
    batch.prefill_tokens(some_ids(299, 40))
    batch.decode_tokens()
    assert batch.cache.nbytes == budget
    with pytest.raises(InputError, match=rf"301 columns; .*; allowed: {budget:,} bytes"):
        batch.decode_tokens()
    assert batch.lengths.tolist() == [300, 41]
    batch.rewind(12)
    batch.decode_tokens()


@both
def test_a_prompt_that_does_not_fit_is_refused_before_it_runs(lowering: str) -> None:
    sessions = hot(lowering)
    batch = Batch(dataclasses.replace(sessions, kv_budget=bytes_at(sessions.states, 1, 550)), 1)
    told: list[int] = []
    batch.progress = lambda stage, done, total: told.append(done)
    with pytest.raises(InputError, match="no room for 600 columns"):
        batch.prefill_tokens(some_ids(600))
    assert (told, batch.lengths.tolist()) == ([], [0])
