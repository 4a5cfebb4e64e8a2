"""Giving back memory: what is resident falls, what is read stays right."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from onnxlm.runtime.memory_release import release_heap, release_pages

PAGE = mmap.PAGESIZE
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")


def resident(file: Path, offset: int) -> int:
    """Bytes of the mapping of `file` from `offset` on that are in memory."""
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if line.endswith(f" {file}"):
            found = int(line.split()[2], 16) == offset
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise LookupError(file)


def touched(file: Path, offset: int, pages: int) -> mmap.mmap:
    """A private mapping, as ONNX Runtime makes them, with every page read."""
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), pages * PAGE, access=mmap.ACCESS_COPY, offset=offset)
    assert sum(mapped[::PAGE]) >= 0
    return mapped


@linux
def test_only_the_mappings_asked_for_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "weights with a space.bin"
    content = b"".join(bytes([65 + index]) * PAGE for index in range(8))
    file.write_bytes(content)
    first, second = touched(file, 0, 4), touched(file, 4 * PAGE, 4)
    assert (resident(file, 0), resident(file, 4 * PAGE)) == (4 * PAGE, 4 * PAGE)
    # An offset inside the first page of a mapping means that mapping.
    assert release_pages(file, [4 * PAGE + 64, 6 * PAGE]) == 4 * PAGE
    assert (resident(file, 0), resident(file, 4 * PAGE)) == (4 * PAGE, 0)
    assert first[:] + second[:] == content


@linux
def test_files_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    files = [tmp_path / folder / "weights.bin" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(bytes(PAGE))
    mapped = [touched(file, 0, 1) for file in files]
    assert release_pages(files[0], [0]) == PAGE
    assert [resident(file, 0) for file in files] == [0, PAGE]
    assert [bytes(each) for each in mapped] == [bytes(PAGE)] * 2


def test_a_file_that_is_gone_or_not_mapped_costs_nothing(tmp_path: Path) -> None:
    assert release_pages(tmp_path / "gone.bin", [0]) == 0
    (tmp_path / "other.bin").write_bytes(b"x")
    assert release_pages(tmp_path / "other.bin", [0]) == 0


def test_other_systems_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(PAGE))
    mapped = touched(file, 0, 1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert release_pages(file, [0]) == 0
    assert mapped[:] == bytes(PAGE)


def heap_blocks(count: int, size: int) -> list[int]:
    """Blocks of the C library's heap, all written to."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    return blocks


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="asks glibc"
)
def test_freed_heap_goes_back() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE

    libc = ctypes.CDLL(None)
    libc.free.argtypes = (ctypes.c_void_p,)
    release_heap()
    *blocks, last = heap_blocks(count=512, size=64 * 1024)  # `last` keeps the heap from shrinking
    for block in blocks:
        libc.free(block)
    before = resident_bytes()
    assert release_heap()
    assert before - resident_bytes() > 16 * 1024**2
    libc.free(last)


def test_heaps_of_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert not release_heap()
