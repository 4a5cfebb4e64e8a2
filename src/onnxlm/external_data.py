"""Refuses an ONNX file whose tensors would be read from anywhere but the package's own data file.

A manifest's hashes tell that a package is as it was written, not that its writer meant well, and
onnxruntime takes an entry without a length and a file that no hash covers. The runtime has no `onnx`
package, so this walks the protobuf wire format itself, through only those messages by which a tensor
can be reached: 20 ms for a graph of 500 nodes, once for each version of a file (see `integrity`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxlm.errors import PackageError

# Message -> field number -> message, for every way from a model to a tensor (onnx.proto).
REACHES_TENSORS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
}
# TensorProto.DataType -> bits of one element; strings (8) cannot be external.
ELEMENT_BITS: Mapping[int, int] = (
    {2: 8, 3: 8, 9: 8, 17: 8, 18: 8, 19: 8, 20: 8, 24: 8, 4: 16, 5: 16, 10: 16, 16: 16}
    | {1: 32, 6: 32, 12: 32, 7: 64, 11: 64, 13: 64, 14: 64, 15: 128}
    | {21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}
)
_KEYS = ("location", "offset", "length", "checksum")
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_DEPTH = 32


class _DamagedError(ValueError):
    """The bytes are no protobuf message."""


@dataclass
class _Tensor:
    name: str = ""
    data_type: int = 0
    dims: list[int] = field(default_factory=list)
    external: bool = False
    entries: list[tuple[str, str]] = field(default_factory=list)


def check_external_data(path: Path, sizes: Mapping[str, int]) -> None:
    """Refuse external-data entries that name another file, or a range that is not one tensor's.

    Initializers, node attributes, subgraphs, functions and sparse tensors are all looked at.

    Args:
        path: The ONNX file.
        sizes: Files in the same folder that tensors may lie in -> their size in bytes.

    Raises:
        PackageError: Names the tensor and the entry; or the file is no ONNX model.
    """
    try:
        for tensor in _tensors(path.read_bytes()):
            if tensor.external or tensor.entries:
                _check_tensor(path, tensor, sizes)
    except OSError as error:
        raise PackageError(f"{path}: cannot be read", found=error.strerror) from error
    except (_DamagedError, UnicodeDecodeError) as error:
        raise PackageError(f"{path}: is no ONNX model", found=error) from error


def tensor_bytes(path: Path) -> dict[str, int]:
    """Bytes of every named tensor of an ONNX file, inside it or beside it, by name.

    Raises:
        PackageError: The file is no ONNX model.
    """
    try:
        tensors = [tensor for tensor in _tensors(path.read_bytes()) if tensor.name]
    except (_DamagedError, UnicodeDecodeError) as error:
        raise PackageError(f"{path}: is no ONNX model", found=error) from error
    return {tensor.name: _byte_count(tensor) or 0 for tensor in tensors}


def _check_tensor(path: Path, tensor: _Tensor, sizes: Mapping[str, int]) -> None:
    where = f"{path}: external data of tensor '{tensor.name}'"
    entries = dict(tensor.entries)
    unknown = sorted(entries.keys() - set(_KEYS))
    if unknown or len(entries) != len(tensor.entries):
        found = f"the key {unknown[0]!r}" if unknown else "a key twice"
        raise PackageError(where, found=found, allowed=", ".join(_KEYS))
    location = entries.get("location")
    if location is None or location not in sizes:
        raise PackageError(f"{where}: location", found=repr(location), allowed=", ".join(sizes))
    offset = _number(entries.get("offset", "0"))
    length = _number(entries.get("length", ""))
    size = sizes[location]
    if offset is None or offset > size:
        found, allowed = entries["offset"], f"0 to {size}"
        raise PackageError(f"{where}: offset", found=repr(found), allowed=allowed)
    expected = _byte_count(tensor)
    if length is None or length != expected or offset + length > size:
        raise PackageError(
            f"{where}: length",
            found=repr(entries.get("length")),
            allowed=f"{expected} bytes, of which {size - offset} are there",
        )


def _number(text: str) -> int | None:
    """A decimal number as the format allows it: no sign, no more digits than any file is long."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _byte_count(tensor: _Tensor) -> int | None:
    """Bytes that the tensor's shape and type take; None where they make no sense."""
    bits = ELEMENT_BITS.get(tensor.data_type)
    if bits is None or any(dim < 0 for dim in tensor.dims):
        return None
    return (math.prod(tensor.dims) * bits + 7) // 8


def _tensors(data: bytes) -> Iterator[_Tensor]:
    """Every tensor of a serialized model, in no particular order."""
    open_messages = [("ModelProto", 0, len(data), 0)]
    while open_messages:
        kind, start, end, depth = open_messages.pop()
        if kind == "TensorProto":
            yield _read_tensor(data, start, end)
            continue
        if depth > _MOST_DEPTH:
            raise _DamagedError("graphs nested too deep")
        inner = REACHES_TENSORS[kind]
        for number, wire, begin, stop in _fields(data, start, end):
            if wire == _BYTES and number in inner:
                open_messages.append((inner[number], begin, stop, depth + 1))


def _read_tensor(data: bytes, start: int, end: int) -> _Tensor:
    tensor = _Tensor()
    for number, wire, begin, stop in _fields(data, start, end):
        if number == _DIMS and wire == _VARINT:
            tensor.dims.append(_signed(_varint(data, begin, stop)[0]))
        elif number == _DIMS and wire == _BYTES:  # packed
            at = begin
            while at < stop:
                value, at = _varint(data, at, stop)
                tensor.dims.append(_signed(value))
        elif number == _DATA_TYPE and wire == _VARINT:
            tensor.data_type = _varint(data, begin, stop)[0]
        elif number == _NAME and wire == _BYTES:
            tensor.name = data[begin:stop].decode("utf-8")
        elif number == _DATA_LOCATION and wire == _VARINT:
            tensor.external = _varint(data, begin, stop)[0] != 0
        elif number == _EXTERNAL_DATA and wire == _BYTES:
            entry = {
                key: data[a:b].decode("utf-8")
                for key, w, a, b in _fields(data, begin, stop)
                if w == _BYTES
            }
            tensor.entries.append((entry.get(1, ""), entry.get(2, "")))
    return tensor


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Fields of one message: (number, wire type, first byte of the value, byte behind it)."""
    while at < end:
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _varint(data, at, end)
        wire = tag & 7
        if wire == _BYTES:
            length, at = _varint(data, at, end)
            stop = at + length
        elif wire == _VARINT:
            stop = _varint(data, at, end)[1]
        elif wire == _FIXED32:
            stop = at + 4
        elif wire == _FIXED64:
            stop = at + 8
        else:
            raise _DamagedError(f"a field of wire type {wire}")
        if stop > end:
            raise _DamagedError("a field that is cut short")
        yield tag >> 3, wire, at, stop
        at = stop


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """(value, byte behind it)."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _DamagedError("a number that is cut short")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
