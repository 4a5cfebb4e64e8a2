"""One folder of the cache of packed graphs: its note, whether it is whole, and when it may go.

The note is written last and deleted first, so a folder with a valid note is whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxlm.package import Package

NOTE_NAME = "prepacked.json"
_UNUSED_S = 30 * 24 * 3600
# A folder that its writer left when it was killed; no build takes that long.
_ABANDONED_S = 24 * 3600


@dataclass(frozen=True)
class Note:
    """What an entry says of itself.

    Attributes:
        package: Folder of the package that it was made of.
        digest: That package's digest.
        raw_offsets: Where in the data file tensors lie as they are in the package.
        files: Size and modification time (ns) of every other file; filled in by `write_note`.
    """

    package: str
    digest: str
    raw_offsets: tuple[int, ...]
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def read_note(entry: Path) -> Note | None:
    """The note of an entry whose files are the ones that were written; None without one."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        raw = json.loads((entry / NOTE_NAME).read_text(encoding="utf-8"))
        files = {name: (size, mtime) for name, (size, mtime) in raw["files"].items()}
        offsets = tuple(int(offset) for offset in raw["raw_offsets"])
        if files and all(_facts(entry / name) == facts for name, facts in files.items()):
            return Note(str(raw["package"]), str(raw["digest"]), offsets, files)
    return None


def write_note(entry: Path, note: Note) -> None:
    """Put the entry's files on the disk, then say what they are.

    Not even a power cut leaves a note beside data that was not written.
    """
    files = {}
    for file in sorted(entry.iterdir()):
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
        files[file.name] = _facts(file)
    with (entry / NOTE_NAME).open("w", encoding="utf-8") as opened:
        json.dump(dataclasses.asdict(dataclasses.replace(note, files=files)), opened)
        opened.flush()
        os.fsync(opened.fileno())


def mark_used(entry: Path) -> None:
    """Note that a session was opened from the entry; a cache that is only read stays usable."""
    with contextlib.suppress(OSError):
        os.utime(entry / NOTE_NAME)


def superseded(cache: Path, package: Package) -> Iterator[Path]:
    """What may go: damaged, unused for 30 days, of a package replaced or deleted since, or abandoned."""
    now = time.time()
    path = str(package.path.resolve())
    for entry in cache.iterdir():
        with contextlib.suppress(OSError):
            if ".tmp-" in entry.name:
                if now - entry.stat().st_mtime > _ABANDONED_S:
                    yield entry
                continue
            if not entry.is_dir():  # a lock
                continue
            note = read_note(entry)
            gone = (
                note is None
                or not Path(note.package).is_dir()
                or (note.package == path and note.digest != package.digest)
            )
            if gone or now - (entry / NOTE_NAME).stat().st_mtime > _UNUSED_S:
                yield entry


def remove_entry(entry: Path) -> None:
    """Delete an entry as far as the system lets us: on Windows, files in use stay, without their note."""
    with contextlib.suppress(OSError):
        (entry / NOTE_NAME).unlink(missing_ok=True)
    shutil.rmtree(entry, ignore_errors=True)


def _facts(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns
