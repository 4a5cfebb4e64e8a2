"""Changes where the tensors of a serialized ONNX model lie; every other byte stays as it is.

The runtime has no `onnx` package, so this edits the protobuf wire format, by the walker of `external_data`.
"""

from __future__ import annotations

from collections.abc import Callable

from onnxlm.external_data import (
    _BYTES,
    _EXTERNAL_DATA,
    _MOST_DEPTH,
    REACHES_TENSORS,
    _DamagedError,
    _fields,
)

# External-data entries of one tensor, in order: ("location", "model.onnx_data"), ("offset", "0"), ...
Entries = list[tuple[str, str]]


def move_tensors(model: bytes, move: Callable[[Entries], Entries]) -> bytes:
    """The model with the external-data entries of every tensor replaced by what `move` makes of them.

    Initializers, node attributes, subgraphs, functions and sparse tensors are all reached; tensors that lie
    inside the model are not shown to `move`.

    Args:
        model: A serialized ModelProto.
        move: Old entries -> new entries.

    Raises:
        ValueError: The bytes are no ONNX model.
    """
    return _edit_message("ModelProto", model, move, 0)


def _edit_message(kind: str, data: bytes, move: Callable[[Entries], Entries], depth: int) -> bytes:
    if kind == "TensorProto":
        return _edit_tensor(data, move)
    if depth > _MOST_DEPTH:
        raise _DamagedError("graphs nested too deep")
    inner = REACHES_TENSORS[kind]
    parts: list[bytes] = []
    at = copied = 0
    for number, wire, begin, stop in _fields(data, 0, len(data)):
        if wire == _BYTES and number in inner:
            old = data[begin:stop]
            new = _edit_message(inner[number], old, move, depth + 1)
            if new != old:
                parts += (data[copied:at], _length_delimited(number, new))
                copied = stop
        at = stop
    parts.append(data[copied:])
    return b"".join(parts)


def _edit_tensor(data: bytes, move: Callable[[Entries], Entries]) -> bytes:
    kept: list[bytes] = []
    entries: Entries = []
    at = 0
    for number, wire, begin, stop in _fields(data, 0, len(data)):
        if wire == _BYTES and number == _EXTERNAL_DATA:
            entries.append(_read_entry(data[begin:stop]))
        else:
            kept.append(data[at:stop])
        at = stop
    if not entries:
        return data
    kept += (_length_delimited(_EXTERNAL_DATA, _write_entry(*entry)) for entry in move(entries))
    return b"".join(kept)


def _read_entry(data: bytes) -> tuple[str, str]:
    texts = {
        number: data[begin:stop].decode("utf-8")
        for number, wire, begin, stop in _fields(data, 0, len(data))
        if wire == _BYTES
    }
    return texts.get(1, ""), texts.get(2, "")


def _write_entry(key: str, value: str) -> bytes:
    return _length_delimited(1, key.encode("utf-8")) + _length_delimited(2, value.encode("utf-8"))


def _length_delimited(number: int, value: bytes) -> bytes:
    return _varint_bytes(number << 3 | _BYTES) + _varint_bytes(len(value)) + value


def _varint_bytes(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
