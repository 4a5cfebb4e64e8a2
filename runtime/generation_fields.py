"""What a field of a generation may hold: each kind checks a value and gives it in one frozen form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from onnxlm.errors import InputError


@dataclass(frozen=True)
class Kind:
    """The values of one field.

    Attributes:
        read: Gives the checked value, or raises ValueError.
        allowed: What an error message says of good values.
        depths: How deep lists are nested in one whole value; a list of values for a batch is one deeper.
    """

    read: Callable[[Any], Any]
    allowed: str
    depths: tuple[int, ...] = (0,)

    def one_a_row(self, value: object) -> bool:
        """Whether `value` is a list with a value for each row of a batch."""
        if not isinstance(value, list | tuple | np.ndarray):
            return False
        if len(value) == 0:
            return self.depths == (0,)
        return _depth(value) not in self.depths or any(one is None for one in value)


def setting(default: object, kind: Kind) -> Any:
    """A dataclass field of this kind; None is a value where it is the default."""
    return dataclasses.field(default=default, metadata={"kind": kind})


def checked(field: dataclasses.Field[Any], value: object) -> Any:
    """The value of a field made by `setting`.

    Raises:
        InputError: It makes no sense; the field is named.
    """
    kind: Kind = field.metadata["kind"]
    if value is None and field.default is None:
        return None
    try:
        return kind.read(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise refused(field.name, value, kind.allowed) from error


def refused(name: str, value: object, allowed: str) -> InputError:
    """The error of a field whose value makes no sense."""
    return InputError(f"generation field '{name}'", found=repr(value), allowed=allowed)


def flag() -> Kind:
    """True or false."""
    return Kind(_flag, "true or false")


def number(allowed: str, least: float, most: float = math.inf, *, above: bool = False) -> Kind:
    """A finite number from `least` (or only above it) to `most`."""

    def read(value: Any) -> float:
        good = _is_real(value) and math.isfinite(value) and least <= value <= most
        if not good or (above and value == least):
            raise ValueError
        return float(value)

    return Kind(read, allowed)


def whole(allowed: str, least: int, most: float = math.inf) -> Kind:
    """An integer from `least` to `most`."""

    def read(value: Any) -> int:
        if not _is_integer(value) or not least <= value <= most:
            raise ValueError
        return int(value)

    return Kind(read, allowed)


def whole_or(word: str, least: int) -> Kind:
    """An integer from `least` up, or a word; digits may be spelled as a string."""

    def read(value: Any) -> int | str:
        if value == word:
            return word
        number = int(value) if isinstance(value, str) else value
        if not _is_integer(number) or number < least:
            raise ValueError
        return int(number)

    return Kind(read, f'an integer from {least} up, or "{word}"')


def one_of(allowed: str, *values: object) -> Kind:
    """One of a few values."""

    def read(value: Any) -> object:
        for good in values:
            if type(good) is type(value) and good == value:  # by type too: 1 == True
                return good
        raise ValueError

    return Kind(read, allowed)


def token_ids() -> Kind:
    """A token id or a list of them; in ascending order, each once."""

    def read(value: Any) -> tuple[int, ...]:
        ids = _ids(value) if _is_list(value) else _ids([value])
        return tuple(sorted(set(ids)))

    return Kind(read, "a token id or a list of token ids", (0, 1))


def token_lists() -> Kind:
    """Lists of token ids, none of them empty."""

    def read(value: Any) -> tuple[tuple[int, ...], ...]:
        if not _is_list(value):
            raise ValueError
        return tuple(_sequence(ids) for ids in value)

    return Kind(read, "a list of lists of token ids, none of them empty", (2,))


def biases() -> Kind:
    """A bias for each of some token sequences, as pairs [ids, bias] or as a mapping from tuples of ids."""

    def read(value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
        if not isinstance(value, Mapping) and not _is_list(value):
            raise ValueError
        pairs = value.items() if isinstance(value, Mapping) else value
        # A sequence that is given twice has the last bias, as in a mapping.
        return tuple({_sequence(ids): _bias(bias) for ids, bias in pairs}.items())

    return Kind(read, "a list of pairs [token ids, bias]", (0, 3))


def token_biases() -> Kind:
    """A bias for each of some tokens; ids may be spelled as strings, as in JSON."""

    def read(value: Any) -> tuple[tuple[int, float], ...]:
        pairs = value.items() if isinstance(value, Mapping) else value
        keys = [(int(key) if isinstance(key, str) else key, bias) for key, bias in pairs]
        return tuple((_ids([key])[0], _bias(bias)) for key, bias in keys)

    return Kind(read, "a mapping from token ids to numbers", (0, 2))


def strings() -> Kind:
    """A string or a list of strings, none of them empty."""

    def read(value: Any) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else list(value)
        if isinstance(value, Mapping) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError
        return tuple(dict.fromkeys(texts))

    return Kind(read, "a text or a list of texts, none of them empty", (0, 1))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _bias(value: Any) -> float:
    if not _is_real(value) or math.isnan(value) or value == math.inf:
        raise ValueError
    return float(value)


def _sequence(value: Any) -> tuple[int, ...]:
    ids = _ids(value)
    if not ids:
        raise ValueError
    return ids


def _ids(value: Sequence[Any]) -> tuple[int, ...]:
    if not _is_list(value) or not all(_is_integer(item) and item >= 0 for item in value):
        raise ValueError
    return tuple(int(item) for item in value)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _depth(value: object) -> int:
    if not isinstance(value, list | tuple | np.ndarray):
        return 0
    return 1 + max(map(_depth, value), default=0)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
