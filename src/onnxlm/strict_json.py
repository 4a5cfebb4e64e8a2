"""JSON objects <-> frozen dataclasses, strictly: every fault is an error that names the field."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from onnxlm.errors import PackageError

T = TypeVar("T")

# Key in a dataclass field's metadata: files written before the field was there leave it out.
YOUNGER = "younger than the format"

_PLAIN = {str: "a string", int: "a whole number", bool: "true or false", float: "a number"}


class _RefusedError(ValueError):
    """JSON that Python's parser takes and this project does not."""


def load_object(path: Path, *, lenient: bool = False) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: The file.
        lenient: Take what others write (``Infinity``, a key twice); a manifest never holds such.

    Raises:
        PackageError: The file cannot be read, is not UTF-8, not JSON, or not an object.
    """
    hooks: dict[str, Any] = {}
    if not lenient:
        hooks = {"object_pairs_hook": _unique, "parse_constant": _refuse_constant}
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), **hooks)
    except OSError as error:
        raise PackageError(
            f"{path}: cannot be read", found=error.strerror or type(error).__name__
        ) from error
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{path}: is not valid JSON", found=error) from error
    if not isinstance(value, dict):
        raise PackageError(f"{path}: holds no JSON object", found=_describe(value))
    return value


def decode(kind: type[T], value: object, source: str) -> T:
    """`value`, parsed JSON, as the dataclass `kind`.

    Args:
        kind: A dataclass whose fields are plain values, tuples, string-keyed mappings, unions with None,
            further dataclasses, or `Any` for free JSON.
        value: What the JSON holds.
        source: The file, for messages.

    Raises:
        PackageError: A field is missing, unknown or of another type.
    """
    return typing.cast(T, _decode(kind, value, source, ""))


def _decode(kind: Any, value: object, source: str, field: str) -> Any:  # noqa: PLR0911 (one line a kind)
    if kind in _PLAIN:
        if kind is float and type(value) is int:
            return value
        return _expect(kind, _PLAIN[kind], value, source, field)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_object(kind, value, source, field)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value, source, field)
    if origin is tuple:
        return _decode_tuple(arguments, value, source, field)
    if origin is not None and issubclass(origin, Mapping):
        items = _expect(dict, "an object", value, source, field)
        return {k: _decode(arguments[1], v, source, _join(field, k)) for k, v in items.items()}
    raise TypeError(f"field '{field}' is declared as {kind}, which is not supported")


def _decode_union(kinds: tuple[Any, ...], value: object, source: str, field: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return _decode(kinds[0], value, source, field)
    if type(value) in kinds:
        return value
    raise _mistyped(source, field, value, " or ".join(_PLAIN[kind] for kind in kinds))


def _decode_object(kind: Any, value: object, source: str, field: str) -> Any:
    items = _expect(dict, "an object", value, source, field)
    hints = _fields(kind)
    names = list(hints)
    for name in names:
        if name not in items and name not in _optional(kind):
            raise PackageError(
                f"{source}: field '{_join(field, name)}' is missing",
                fix="export or quantize the package again",
            )
    for name in items:
        if name not in names:
            raise PackageError(
                f"{source}: field '{_join(field, name)}' is unknown", allowed=", ".join(names)
            )
    given = (name for name in names if name in items)
    return kind(**{n: _decode(hints[n], items[n], source, _join(field, n)) for n in given})


@functools.cache  # resolving the types takes 20 us, and a manifest holds hundreds of tensors
def _fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


@functools.cache
def _optional(kind: Any) -> frozenset[str]:
    """Fields marked as younger than the format: a file without them means their defaults."""
    return frozenset(f.name for f in dataclasses.fields(kind) if f.metadata.get(YOUNGER))


def _decode_tuple(kinds: tuple[Any, ...], value: object, source: str, field: str) -> Any:
    items = _expect(list, "a list", value, source, field)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(items)
    elif len(kinds) != len(items):
        raise _mistyped(source, field, items, f"a list of {len(kinds)}")
    pairs = zip(kinds, items, strict=True)
    return tuple(_decode(k, item, source, f"{field}[{i}]") for i, (k, item) in enumerate(pairs))


def _expect(kind: type[T], words: str, value: object, source: str, field: str) -> T:
    if type(value) is not kind:  # not isinstance: true is no whole number
        raise _mistyped(source, field, value, words)
    return value


def _mistyped(source: str, field: str, value: object, words: str) -> PackageError:
    what = f"field '{field}' has a wrong type" if field else "has a wrong type"
    return PackageError(f"{source}: {what}", found=_describe(value), allowed=words)


def encode(value: Any) -> str:
    """A dataclass as indented JSON with its fields in their order.

    Raises:
        PackageError: A number is not finite, or a free field holds what JSON cannot.
    """
    plain = dataclasses.asdict(value)
    _check_finite(plain, "")
    try:
        return json.dumps(plain, indent=2, allow_nan=False) + "\n"
    except TypeError as error:
        raise PackageError("a manifest cannot hold this value", found=error) from error


def _check_finite(value: object, field: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise PackageError(f"field '{field}' is not a finite number", found=value)
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, _join(field, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_finite(item, f"{field}[{index}]")


def _join(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _describe(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RefusedError(f"the key '{twice}' twice in one object")
    return result


def _refuse_constant(text: str) -> float:
    raise _RefusedError(f"the number {text}")
