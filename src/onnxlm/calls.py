"""What a proof runs, call by call, and what runs it: data that export and runtime hand to each other.

Shapes: B rows, n tokens of a row, V vocabulary size, H hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxlm import io_spec

Floats = NDArray[np.float32]
Ids = Sequence[int]


@dataclass(frozen=True)
class Calls:
    """Given tokens through both graphs of a package, one cache from the first call to the last.

    Attributes:
        chunks: chunks[c][b] are the new tokens of row b in prefill call c.
        steps: steps[s][b] is the token of row b in decode step s.
    """

    chunks: tuple[tuple[tuple[int, ...], ...], ...]
    steps: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_row(cls, ids: Ids, chunks: Sequence[int]) -> Calls:
        """One row: chunks of the given lengths, then every token that is left as a decode step."""
        ends = list(accumulate(chunks, initial=0))
        return cls(
            tuple((tuple(ids[a:b]),) for a, b in pairwise(ends)),
            tuple((token,) for token in ids[ends[-1] :]),
        )

    @classmethod
    def of_batch(cls, rows: Sequence[Ids], steps: int) -> Calls:
        """Several rows: all but the last `steps` tokens of each in one padded call, then decode steps."""
        first = tuple(tuple(row[: len(row) - steps]) for row in rows)
        forced = [row[len(row) - steps :] for row in rows]
        return cls((first,), tuple(zip(*forced, strict=True)))

    @property
    def rows(self) -> int:
        """Rows, B."""
        return len(self.chunks[0])

    @property
    def graph(self) -> str:
        """The graph that the last call runs."""
        return io_spec.DECODE if self.steps else io_spec.PREFILL

    def tokens(self, row: int) -> list[int]:
        """Every token of a row, in order."""
        forced = [step[row] for step in self.steps]
        return [token for chunk in self.chunks for token in chunk[row]] + forced

    def ends(self, row: int) -> list[int]:
        """How many tokens of a row are in the cache behind each call."""
        sizes = [*(len(chunk[row]) for chunk in self.chunks), *(1 for _ in self.steps)]
        return list(accumulate(sizes))

    def kept(self, row: int) -> list[int]:
        """Positions of a row whose logits `Runner.logits` gives.

        Of a row that runs alone all; of a padded batch those behind each call's last token.
        """
        ends = self.ends(row)
        return list(range(ends[-1])) if self.rows == 1 else [end - 1 for end in ends]

    def call_of(self, row: int, position: int) -> int:
        """The number of the call that runs a token."""
        return next(call for call, end in enumerate(self.ends(row)) if position < end)

    def last(self, row: int) -> int:
        """How many tokens of a row the last call runs."""
        return 1 if self.steps else len(self.chunks[-1][row])

    def until(self, call: int) -> Calls:
        """The calls up to and with number `call`."""
        chunks = self.chunks[: call + 1]
        return Calls(chunks, self.steps[: max(0, call + 1 - len(self.chunks))])


class Stream(Protocol):
    """Gives the logits of long texts piece by piece."""

    def stream(self, ids: Ids, chunk: int) -> Iterator[Floats]:
        """Logits behind every token of a row, [<= chunk, V] a piece."""
        ...


class Reference(Stream, Protocol):
    """What a package is held against."""

    def logits(self, ids: Ids) -> Floats:
        """Logits behind every token of a row that runs alone and at once, [n, V]."""
        ...

    def hidden(self, ids: Ids) -> Floats | None:
        """The residual stream before the first layer and behind each, [L + 1, n, H]; None where unknown."""
        ...


class Runner(Stream, Protocol):
    """Runs a package."""

    def run(self, calls: Calls) -> list[Floats]:
        """Logits of each row at the positions `Calls.kept`, [kept, V]."""
        ...

    def greedy(self, ids: Ids, count: int) -> list[int]:
        """The `count` tokens that greedy decoding puts behind a prompt, whatever ends a text."""
        ...

    def stream_decode(self, ids: Ids, chunk: int) -> Iterator[Floats]:
        """As `stream`, but every token behind the first chunk runs as a decode step of its own."""
        ...

    def values(
        self, calls: Calls, probe: bytes, names: Sequence[str]
    ) -> list[Mapping[str, Floats]]:
        """Run the last of the calls on another graph and look inside it.

        Args:
            calls: What to run.
            probe: An ONNX model without weights: the graph `calls.graph` with more outputs.
            names: The outputs wanted, each [B, S, ...] over the new tokens of the call.

        Returns:
            For each row the wanted outputs, [n, ...] with n the row's tokens in that call.
        """
        ...
