"""Putting a finished folder in the place of an old one, so that a kill at any moment loses neither.

No system call exchanges two folders on every platform, so there is an instant at which the old package
has been renamed aside and the new one is not in place yet. Both are whole then, and `recover` finishes the
work: it is called before every write, and by a reader that finds nothing where a package should be.

    .name.tmp-x   being written; whole as soon as it holds a manifest, which is written last
    .name.old-x   the old package, moved aside
    .name.lock    held by the process that writes: leftovers of a live one are not touched
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from onnxlm.errors import ExportError
from onnxlm.manifest import MANIFEST_NAME, is_package

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


def sibling(destination: Path, kind: str) -> Path:
    """An unused path beside `destination` that `leftovers` finds."""
    name = f".{destination.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"
    return destination.with_name(name)


def temporary_sibling(destination: Path) -> Path:
    """A new empty folder beside `destination`, made with the user's own permissions."""
    path = sibling(destination, "tmp")
    path.mkdir()
    return path


def swap_in(temporary: Path, destination: Path) -> None:
    """Rename `temporary` to `destination`; a package or empty folder there gives way.

    Raises:
        ExportError: A file of the old package is in use (Windows); the old package is back in place.
    """
    aside: Path | None = None
    try:
        if is_package(destination):
            aside = sibling(destination, "old")
            os.rename(destination, aside)
        elif destination.is_dir():
            destination.rmdir()
        os.rename(temporary, destination)
    except BaseException as error:
        if aside is not None and aside.exists() and not destination.exists():
            os.rename(aside, destination)
        if isinstance(error, OSError):
            raise ExportError(
                f"{destination}: cannot be replaced",
                found=error.strerror,
                fix="close what uses the package and try again",
            ) from error
        raise
    if aside is not None:
        remove_package(aside)


def recover(destination: Path) -> None:
    """Finish or undo what a killed writer left beside `destination`; call it under `writer_lock`.

    With nothing in place, a whole new folder moves in, else the old one moves back. The rest is deleted.
    """
    temporary, aside = leftovers(destination)
    if not destination.exists():
        whole = [path for path in (*temporary, *aside) if is_package(path)]
        if whole:
            os.rename(whole[0], destination)
    for path in (*temporary, *aside):
        remove_package(path)


def leftovers(destination: Path) -> tuple[list[Path], list[Path]]:
    """Folders that writers left beside `destination`: (unfinished or new, old)."""
    found: list[list[Path]] = []
    for kind in ("tmp", "old"):
        prefix = f".{destination.name}.{kind}-"
        paths = (
            [path for path in destination.parent.iterdir() if path.name.startswith(prefix)]
            if destination.parent.is_dir()
            else []
        )
        found.append(sorted(path for path in paths if path.is_dir() and not path.is_symlink()))
    return found[0], found[1]


def remove_package(path: Path) -> None:
    """Delete a folder, its manifest first: what is left of it by a kill is never taken for whole."""
    with contextlib.suppress(OSError):
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(path)


@contextlib.contextmanager
def writer_lock(destination: Path) -> Iterator[None]:
    """Hold the right to write `destination`; the system takes it back when the process dies.

    Raises:
        ExportError: Another process is writing it.
    """
    path = destination.with_name(f".{destination.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise ExportError(
                f"{destination}: is being written by another onnxlm process",
                fix="wait for it, or choose another folder",
            ) from error
        # The last holder deletes the file while it holds it: a lock on a deleted file is worth nothing.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        if sys.platform != "win32":
            path.unlink(missing_ok=True)
        os.close(descriptor)
        if sys.platform == "win32":
            with contextlib.suppress(OSError):  # the next process has it open already
                path.unlink(missing_ok=True)


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
