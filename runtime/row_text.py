"""The text of one row as it becomes certain, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from onnxlm.runtime.streaming import TextStream
from onnxlm.runtime.tokenizer import Tokenizer


class StopMatcher:
    """Finds stop strings in text that comes in pieces, however it is cut.

    The stop string that is complete first ends the text, the longest of those that are complete at once. So
    what comes out does not depend on where the pieces begin and end.

    Args:
        stops: Stop strings, none of them empty.

    Attributes:
        stopped: Whether one has come; what comes then is dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._most = max(map(len, stops), default=1) - 1
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Text that no stop string can take back any more."""
        if self.stopped or not piece:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = next(
            (n for n in range(min(self._most, len(text)), 0, -1) if self._begins(text, n)), 0
        )
        sure = len(text) - held
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """The text still held, which nothing takes back any more."""
        held, self._held = self._held, ""
        return held

    def _begins(self, text: str, count: int) -> bool:
        """Whether the last characters of a text may be the first ones of a stop string."""
        return any(stop.startswith(text[-count:]) for stop in self._stops)


class RowText:
    """Turns the tokens of one row into text.

    Args:
        tokenizer: Where the ids come from.
        stops: Stop strings.

    Attributes:
        text: What is certain so far, nothing of a stop string in it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._matcher = StopMatcher(stops)
        self._finished = False
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._matcher.stopped

    def push(self, token_id: int) -> None:
        """Take a token."""
        self.text += self._matcher.push(self._stream.push(token_id))

    def finish(self) -> None:
        """Take the text that is still held, after the last token; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        self.text += self._matcher.push(self._stream.finish())
        self.text += self._matcher.finish()
