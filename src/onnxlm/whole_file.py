"""Files that are written whole or not at all: an old one stays until the new one is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from onnxlm.errors import InputError

_DEVICES = Path("/dev")


def check_target(path: Path) -> None:
    """Refuse, before any long work, a file that could not be written. Nothing is left there.

    Raises:
        InputError: It is a folder, lies in none, or cannot be written.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder", fix="name a file")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: there is no such folder", fix="make it first")
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"{path}: may not be written", fix="name another file")
    if _in_place(path):
        return
    # Asking for permission is no answer on network shares and on Windows; trying is.
    part = _part(path)
    try:
        part.touch(exist_ok=False)
        part.unlink()
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written",
            found=error.strerror,
            fix=f"choose another folder, or make {path.absolute().parent} writable",
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8, whole or not at all.

    Raises:
        OSError: It cannot be written; what was there is there still.
    """
    data = text.encode("utf-8")
    if _in_place(path):
        path.write_bytes(data)
        return
    target, part = path.resolve(), _part(path)
    try:
        with part.open("xb") as file:
            file.write(data)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _in_place(path: Path) -> bool:
    """A device or a pipe is written to; to put a file in its place would take it away from all others."""
    return path.exists() and (not path.is_file() or _DEVICES in path.absolute().parents)


def _part(path: Path) -> Path:
    """A new name beside the file that a link leads to: only within a file system is a rename at once."""
    target = path.resolve()
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
