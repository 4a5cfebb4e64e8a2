"""Optimized graphs of one package over one data file that holds every weight as it is and packed.

ONNX Runtime's CPU kernels re-arrange ("pack") their weights when a session opens, each session its own
copy. It can save a graph with the packed weights beside the raw ones, and sessions opened from that file map
them. It saves one graph at a time, so what graphs have in common is found here, by content, and written once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from onnxlm.runtime.onnx_wire import Entries, move_tensors
from onnxlm.runtime.session import SessionConfig, open_session, session_options

DATA_NAME = "weights.bin"
FATAL_ONLY = 4
# Smaller tensors stay inside the graph.
_INLINE_BYTES = 1024
# A blob is mapped by itself: from here on at a page of its own, below at a cache line.
_PAGE = 4096
_LINE = 64


def write_prepacked(
    graphs: Mapping[str, Path], folder: Path, config: SessionConfig
) -> tuple[int, ...]:
    """Write every graph and their one data file into `folder`.

    Args:
        graphs: File name to write -> the graph, its weights beside it.
        folder: An existing folder.
        config: Provider and options under which the graphs will run.

    Returns:
        Where in the data file the tensors lie that are not packed.

    Raises:
        PackageError: ONNX Runtime cannot load a graph, or cannot save it.
        OSError: The disk is full, or the folder cannot be written.
        ValueError: What ONNX Runtime saved is not what it is known to save.
    """
    with (folder / DATA_NAME).open("wb") as file:
        data = _SharedData(file)
        for name, graph in graphs.items():
            optimized, weights = folder / f"{name}.whole", folder / f"{name}.whole_data"
            _save_optimized(graph, optimized, weights, config)
            model = data.add(optimized.read_bytes(), weights)
            (folder / name).write_bytes(model)
            # At once: beside the shared file lies never more than one graph's own.
            optimized.unlink()
            weights.unlink(missing_ok=True)
        return tuple(sorted(data.raw_offsets))


def _save_optimized(graph: Path, optimized: Path, weights: Path, config: SessionConfig) -> None:
    options = session_options(config)
    options.log_severity_level = FATAL_ONLY  # what fails is raised
    options.optimized_model_filepath = str(optimized)
    prefix = "session.optimized_model_external_initializers"
    for key, value in (
        ("session.save_external_prepacked_constant_initializers", "1"),
        (f"{prefix}_file_name", weights.name),
        (f"{prefix}_min_size_in_bytes", str(_INLINE_BYTES)),
    ):
        options.add_session_config_entry(key, value)
    open_session(graph, config, options)


class _SharedData:
    """A data file that holds no blob twice.

    Args:
        file: Open for writing, empty.

    Attributes:
        raw_offsets: Where tensors begin that are not packed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offsets: dict[tuple[int, bytes], int] = {}
        self.raw_offsets: set[int] = set()

    def add(self, model: bytes, source: Path) -> bytes:
        """Copy the tensors that lie in `source`, and return `model` with them in this file."""
        if not source.exists() or source.stat().st_size == 0:
            return model  # every tensor is small
        with (
            source.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            return move_tensors(model, lambda entries: self._move(entries, source.name, view))

    def _move(self, entries: Entries, source: str, view: memoryview) -> Entries:
        old = dict(entries)
        if old.pop("location", None) != source:
            raise ValueError(f"a tensor lies outside {source}")
        length = old.pop("length")
        offset = self._place(view, old.pop("offset", "0"), length)
        self.raw_offsets.add(offset)
        moved = [("location", DATA_NAME), ("offset", str(offset)), ("length", length)]
        for key, value in old.items():
            if not key.startswith("prepacked"):
                raise ValueError(f"external data has the unknown key {key!r}")
            moved.append((key, self._move_packed(value, view)))
        return moved

    def _move_packed(self, value: str, view: memoryview) -> str:
        """Move the blobs of a ``kernel+hash|offset;length;checksum|...`` entry."""
        kernel, *blobs = value.split("|")
        moved = [kernel]
        for blob in blobs:
            offset, length, checksum = blob.split(";")
            moved.append(f"{self._place(view, offset, length)};{length};{checksum}")
        return "|".join(moved)

    def _place(self, view: memoryview, offset: str, length: str) -> int:
        """Where in this file the blob lies, which is written if it is a new one."""
        begin, end = int(offset), int(offset) + int(length)
        if not 0 <= begin <= end <= len(view):
            raise ValueError(f"a blob ends at byte {end} of {len(view)}")
        with view[begin:end] as blob:
            key = (len(blob), hashlib.sha256(blob).digest())
            if key not in self._offsets:
                step = _PAGE if len(blob) >= _PAGE else _LINE
                self._file.seek(-self._file.tell() % step, os.SEEK_CUR)
                self._offsets[key] = self._file.tell()
                self._file.write(blob)
            return self._offsets[key]
