"""The files that a command leaves behind its measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from onnxlm.errors import InputError
from onnxlm.whole_file import write_whole


def write_files(texts: Iterable[tuple[Path, Callable[[], str]]]) -> None:
    """Write every file that can be; what takes minutes to measure is not lost with one of them.

    Args:
        texts: Files, and what makes their texts.

    Raises:
        InputError: Some could not be written; the others are.
    """
    failed = []
    for file, text in texts:
        try:
            write_whole(file, text())
        except OSError as error:
            failed.append(f"{file}: cannot be written; found {error.strerror}")
    if failed:
        raise InputError("; ".join(failed))
