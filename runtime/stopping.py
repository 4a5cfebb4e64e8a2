"""When a row of a generation ends, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onnxlm.errors import InputError
from onnxlm.runtime.tokenizer import Tokenizer
from onnxlm.strict_json import load_object

# "eos": the model ended the text; "stop": a stop string or a stop token came; "length": max_new_tokens were
# made; "context": no position is left; "cancelled": who wanted the text wants no more of it.
StopReason = Literal["eos", "stop", "length", "context", "cancelled"]

_CONFIG_FILES = ("config.json", "generation_config.json")


def eos_token_ids(sources: Mapping[str, object]) -> frozenset[int]:
    """The union of what several files call the end of a text: each file forgets some.

    Args:
        sources: Value of eos_token_id by the name of the file it is from: an id, a list of ids or null.

    Raises:
        InputError: A value is anything else (a string, a negative number); the file is named.
    """
    ids: set[int] = set()
    for name, value in sources.items():
        listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for token_id in listed:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise InputError(
                    f"{name}: field 'eos_token_id'",
                    found=repr(value),
                    allowed="a token id, a list of token ids, or null",
                )
            ids.add(token_id)
    return frozenset(ids)


def read_eos_token_ids(folder: str | Path, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """The end-of-text ids of a package: of config.json, generation_config.json and the tokenizer.

    Raises:
        PackageError: One of the files is no JSON object.
        InputError: An eos_token_id is neither an id, a list of ids nor null.
    """
    sources = {
        name: load_object(Path(folder) / name, lenient=True).get("eos_token_id")
        for name in _CONFIG_FILES
        if (Path(folder) / name).is_file()
    }
    if tokenizer is not None:
        sources["tokenizer_config.json"] = tokenizer.eos_token_id
    return eos_token_ids(sources)


@dataclass(frozen=True)
class RowLimits:
    """What ends one row.

    Attributes:
        room: New tokens that fit behind its prompt.
        max_new_tokens: New tokens it may have; None for as many as fit.
        eos: Ids that end its text.
        stop_token_ids: Ids that end it and have no part in it.
    """

    room: int
    max_new_tokens: int | None = None
    eos: Collection[int] = ()
    stop_token_ids: Collection[int] = ()

    def reason(self, count: int, token_id: int | None = None) -> StopReason | None:
        """Why the row ends with its `count`-th token; None when it goes on."""
        if token_id in self.eos:
            return "eos"
        if token_id in self.stop_token_ids:
            return "stop"
        if self.max_new_tokens is not None and count >= self.max_new_tokens:
            return "length"
        return "context" if count >= self.room else None


class RowStops:
    """Follows the rows of one generation; each stops on its own.

    Args:
        limits: What ends each row.

    Attributes:
        reasons: Why each row stopped; None while it runs. A row that may have no token at all is
            stopped from the start.
        counts: int64 [rows], tokens each row has so far, the one that ended it included.
    """

    def __init__(self, limits: Sequence[RowLimits]) -> None:
        self._limits = list(limits)
        self.reasons = [one.reason(0) for one in limits]
        self.counts = np.zeros(len(limits), dtype=np.int64)

    @property
    def running(self) -> NDArray[np.bool_]:
        """Rows that still take tokens, bool [rows]."""
        return np.array([reason is None for reason in self.reasons], dtype=np.bool_)

    def update(self, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Take the next token of every row; what comes for a stopped row is not looked at.

        Args:
            token_ids: [rows].
        """
        for row, token_id in enumerate(token_ids):
            if self.reasons[row] is None:
                self.counts[row] += 1
                count = int(self.counts[row])
                self.reasons[row] = self._limits[row].reason(count, int(token_id))

    def stop(self, row: int) -> None:
        """End a row whose text, the last token's included, holds a stop string."""
        if self.reasons[row] != "eos":
            self.reasons[row] = "stop"
