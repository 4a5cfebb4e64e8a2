"""Texts that a user gives."""

from __future__ import annotations

from pathlib import Path

from onnxlm.errors import InputError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        InputError: It cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read", found=error.strerror) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text", found=f"byte {error.start}", fix="save the file as UTF-8"
        ) from error
    if not text.strip():
        raise InputError(f"{path}: is empty", fix="give a file with text")
    return text
