"""The turns of `onnxlm chat`: messages and commands in, answers out."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxlm.cli.generation_options import speed_line
from onnxlm.cli.message_reader import FENCE, Lines, PipedLines, TypedLines, read_entry
from onnxlm.cli.terminal import aside, note
from onnxlm.errors import InputError, OnnxlmError
from onnxlm.runtime import Chat, LanguageModel, TextIterator

_HELP = f"""\
/system TEXT  let TEXT be the system message; without TEXT there is none
/reset        forget the conversation, all but the system message
/save FILE    write the conversation to FILE
/load FILE    go on with the conversation in FILE
/help         show this
/exit         leave, as does Ctrl-D
{FENCE}           begins a message of several lines, and ends it
//            begins a message that begins with /
Ctrl-C        stops an answer"""


class ChatLoop:
    """Reads a message, answers, and again.

    At a terminal a fault is told and the next message asked for; in a pipe it ends the run.

    Args:
        model: What answers.
        chat: The conversation.
        fields: Of `Chat.send`.
    """

    def __init__(self, model: LanguageModel, chat: Chat, fields: Mapping[str, Any]) -> None:
        self._model = model
        self._chat = chat
        self._fields = fields
        self._typed = sys.stdin.isatty()
        self._lines: Lines = TypedLines() if self._typed else PipedLines()
        self._commands: Mapping[str, Callable[[str], None]] = {
            "system": self._set_system,
            "reset": self._reset,
            "save": self._save,
            "load": self._load,
            "help": lambda _: note(_HELP),
        }

    def run(self) -> None:
        """All turns, until the input ends."""
        if self._typed:
            note(f"{self._model.package.path}, {self._model.provider}; /help tells of commands")
        going = True
        while going:
            try:
                going = self._turn()
            except OnnxlmError as error:
                if not self._typed:
                    raise
                note(f"error: {error}")
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                sys.stderr.write("\n")  # what was typed is given up

    def _turn(self) -> bool:
        """One message or command; whether there may be more."""
        entry = read_entry(self._lines)
        if entry is None:
            return False
        text = entry.text
        if not entry.quoted and text.startswith("/"):
            if not text.startswith("//"):
                return self._command(text)
            text = text[1:]
        if text.strip():
            self._answer(text)
        return True

    def _command(self, text: str) -> bool:
        name, _, rest = text[1:].partition(" ")
        if name == "exit":
            return False
        if name not in self._commands:
            raise InputError(
                "command",
                found=f"/{name}",
                allowed=", ".join(f"/{known}" for known in (*self._commands, "exit")),
                fix="begin a message with // if its first character is /",
            )
        self._commands[name](rest.strip())
        return True

    def _answer(self, text: str) -> None:
        reply = self._chat.send(text, **self._fields)
        with _interrupt_cancels(reply) if self._typed else contextlib.nullcontext():
            for piece in reply:
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        aside(speed_line(reply.result, self._model.provider))

    def _set_system(self, text: str) -> None:
        self._chat.system = text or None

    def _reset(self, _: str) -> None:
        self._chat.reset()

    def _save(self, name: str) -> None:
        self._chat.save(_path(name))
        note(f"saved in {name}")

    def _load(self, name: str) -> None:
        self._chat = self._model.load_chat(_path(name))
        note(f"{len(self._chat.messages)} messages from {name}")


def _path(name: str) -> Path:
    if not name:
        raise InputError("the command needs the name of a file")
    return Path(name).expanduser()


@contextlib.contextmanager
def _interrupt_cancels(reply: TextIterator) -> Iterator[None]:
    """Let Ctrl-C end the answer rather than the program."""
    before = signal.signal(signal.SIGINT, lambda *_: reply.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
