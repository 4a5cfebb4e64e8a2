"""The text of one generation as it comes: for `for`, for `async for`, and for whoever wants it to end."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxlm.runtime.generation import Generation


class TextIterator(Iterator[str]):
    """Text as it comes; `result` tells the rest once it has ended.

    Any thread may call any method.

    Args:
        chunks: The pieces of text.
        result: What they have come to.
        cancelled: Ends the generation behind `chunks` within one step, once set.
    """

    def __init__(
        self,
        chunks: Generator[str, None, None],
        result: Callable[[], Generation],
        cancelled: threading.Event,
    ) -> None:
        self._chunks = chunks
        self._result = result
        self._cancelled = cancelled
        # A generator that runs in one thread cannot be closed by another.
        self._step = threading.RLock()

    def __next__(self) -> str:
        with self._step:
            return next(self._chunks)

    def cancel(self) -> None:
        """End it within one step, and return at once; who reads it gets the text that is still held."""
        self._cancelled.set()

    def close(self) -> None:
        """End it; once this returns no step runs, and no text comes any more."""
        self.cancel()
        with self._step:
            self._chunks.close()

    @property
    def result(self) -> Generation:
        """The whole generation so far; complete after the last piece of text."""
        return self._result()


class AsyncTextIterator(AsyncIterable[str]):
    """The same for asyncio. Every step runs in a worker thread; none runs while nobody waits for it.

    Leaving the loop, by `break`, an exception or a cancelled task, ends the generation.

    Args:
        stream: What gives the text.
    """

    def __init__(self, stream: TextIterator) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        try:
            while (piece := await self._next()) is not None:
                yield piece
        finally:
            self._stream.cancel()

    async def _next(self) -> str | None:
        import asyncio  # 20 ms that most runs do not need

        step = asyncio.ensure_future(asyncio.to_thread(next, self._stream, None))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            # The thread cannot be left to itself: who cancels may use the cache next.
            self._stream.cancel()
            await asyncio.gather(step, return_exceptions=True)
            raise

    def cancel(self) -> None:
        """End it within one step; any thread may call this."""
        self._stream.cancel()

    @property
    def result(self) -> Generation:
        """The whole generation so far; complete after the last piece of text."""
        return self._stream.result
