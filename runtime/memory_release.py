"""Gives back memory that only the opening of a package needed: pages of mapped files, and freed heap."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection
from pathlib import Path

_MADV_DONTNEED = 4  # Linux, <asm-generic/mman-common.h>


def release_pages(file: Path, offsets: Collection[int]) -> int:
    """Drop the resident pages of this process's mappings of `file`; a page that is read again comes back.

    ONNX Runtime keeps scales mapped after it has packed them, and never reads them again. Nothing may have
    written to the mappings: what is dropped is read from the file.

    Args:
        file: A file that is mapped.
        offsets: Only mappings that begin in a page that holds one of these bytes of the file.

    Returns:
        Bytes of those mappings; 0 where the system has no such call.
    """
    if sys.platform != "linux":
        return 0
    try:
        inode = os.stat(file).st_ino
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = os.sysconf("SC_PAGE_SIZE")
    begins = {offset // page * page for offset in offsets}
    dropped = 0
    for line in lines:
        addresses, _, offset, _, mapped_inode, *path = line.split(maxsplit=5)
        # The device is not compared, btrfs tells another one here; the name will do.
        if int(mapped_inode) != inode or Path(*path).name != file.name:
            continue
        if int(offset, 16) in begins:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if libc.madvise(begin, end - begin, _MADV_DONTNEED) == 0:
                dropped += end - begin
    return dropped


def release_heap() -> bool:
    """Hand freed memory of the heap back to the system, where the C library can (glibc).

    Reading a tokenizer.json of 49,000 tokens leaves 18 MiB behind. Half of it would never be used again:
    SmolLM2-135M int8 holds 260 MiB behind 128 tokens and 64 steps instead of 269.

    Returns:
        Whether some was handed back.
    """
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1
