"""Messages from standard input: typed at a terminal with line editing, or piped in, one a line."""

from __future__ import annotations

import contextlib
import sys
from typing import NamedTuple, Protocol

from onnxlm.errors import InputError

FIRST, NEXT = ">>> ", "... "
FENCE = '"""'


class Lines(Protocol):
    """Where lines come from."""

    def read(self, sign: str) -> str | None:
        """The next line without its end; None when there is no more.

        Args:
            sign: What asks for it, where somebody types.
        """


class TypedLines:
    """Lines from a terminal; with the keys of readline and its memory of lines, where that exists."""

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):  # not on Windows, whose console edits lines itself
            import readline  # noqa: F401 - `input` uses it once it is imported

    def read(self, sign: str) -> str | None:
        """The next line; None at Ctrl-D."""
        if not sys.stdout.isatty():  # the answers go elsewhere, and signs are no part of them
            sys.stderr.write(sign)
            sys.stderr.flush()
            sign = ""
        try:
            return input(sign)
        except EOFError:
            sys.stderr.write("\n")
            return None


class PipedLines:
    """Lines from a pipe or a file, in UTF-8."""

    def read(self, sign: str) -> str | None:
        """The next line.

        Raises:
            InputError: It is not UTF-8.
        """
        line = sys.stdin.buffer.readline()
        if not line:
            return None
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(
                "a line on standard input is not UTF-8", found=f"byte {error.start}"
            ) from error


class Entry(NamedTuple):
    """What was typed.

    Attributes:
        text: The text, without quotes around it.
        quoted: There were some: it is a message, whatever it begins with.
    """

    text: str
    quoted: bool


def read_entry(lines: Lines) -> Entry | None:
    """The next line, or all lines from one that begins with three quotes to one that ends so.

    Returns:
        None when there is no more.

    Raises:
        InputError: The input ends before the quotes do.
    """
    line = lines.read(FIRST)
    if line is None:
        return None
    if not line.lstrip().startswith(FENCE):
        return Entry(line, quoted=False)
    line = line.lstrip().removeprefix(FENCE)
    block = []
    while not line.rstrip().endswith(FENCE):
        block.append(line)
        following = lines.read(NEXT)
        if following is None:
            raise InputError(f"a message that begins with {FENCE} does not end with {FENCE}")
        line = following
    block.append(line.rstrip().removesuffix(FENCE))
    return Entry("\n".join(block).strip("\n"), quoted=True)
