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

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Text that no stop string can take back any more.

        Args:
            piece: What comes next.
            may_stop: Whether a stop string that is complete with this piece counts.
        """
        if self.stopped or not piece:
            return ""
        text, before = self._held + piece, len(self._held)
        found = [
            (at + len(stop), at)
            for stop in (self._stops if may_stop else ())
            if (at := text.find(stop, max(0, before + 1 - len(stop)))) >= 0
        ]
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
        begun: Tokens of the text that the row goes on with; only what comes behind it is given.

    Attributes:
        text: What is certain so far, nothing of a stop string in it.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], begun: Sequence[int] = ()
    ) -> None:
        self._stream = TextStream(tokenizer)
        told = "".join(map(self._stream.push, begun))
        # Characters of what has begun that the stream still holds.
        self._known = len(tokenizer.decode(begun)) - len(told) if begun else 0
        self._matcher = StopMatcher(stops)
        self._may_stop = True
        self._finished = False
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._matcher.stopped

    def push(self, token_id: int, may_stop: bool = True) -> None:
        """Take a token.

        Args:
            token_id: The token.
            may_stop: Whether a stop string that is complete with it ends the text.
        """
        self._may_stop = may_stop
        self._take(self._stream.push(token_id))

    def finish(self) -> None:
        """Take the text that is still held, after the last token; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        self._take(self._stream.finish())
        self.text += self._matcher.finish()

    def _take(self, piece: str) -> None:
        new, self._known = piece[self._known :], max(0, self._known - len(piece))
        self.text += self._matcher.push(new, self._may_stop)
