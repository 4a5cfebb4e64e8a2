"""Nodes and constants of an ONNX file, read from the protobuf wire format: the runtime has no `onnx` package.

Only the main graph is read, and of a tensor only its name, type and shape: 30 ms for 500 nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxlm.errors import PackageError
from onnxlm.external_data import (
    _BYTES,
    _VARINT,
    ELEMENT_BITS,
    _DamagedError,
    _fields,
    _read_tensor,
    _signed,
    _varint,
)

# Field numbers of onnx.proto.
_GRAPH = 7
_NODE, _INITIALIZER = 1, 5
_INPUT, _OUTPUT, _NAME, _OP_TYPE, _ATTRIBUTE = 1, 2, 3, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_INT = 1, 3


@dataclass(frozen=True)
class Node:
    """One operator.

    Attributes:
        name: Unique in graphs that ONNX Runtime or onnxlm wrote.
        op_type: Without the domain.
        inputs: Names of values; "" for one that is left out.
        outputs: The same.
        integers: Attributes that are whole numbers, by name.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    integers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Constant:
    """A tensor that the file holds or refers to.

    Attributes:
        dims: Its shape.
        bytes: Its size.
    """

    dims: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """How many numbers, as the shape tells."""
        return math.prod(self.dims)


@dataclass(frozen=True)
class Graph:
    """The main graph of a file: nodes in their order, constants by name."""

    nodes: tuple[Node, ...]
    constants: Mapping[str, Constant]


def read_graph(path: Path) -> Graph:
    """The main graph of an ONNX file.

    Raises:
        PackageError: The file cannot be read or is no ONNX model.
    """
    nodes: list[Node] = []
    constants: dict[str, Constant] = {}
    try:
        data = path.read_bytes()
        for number, wire, begin, stop in _fields(data, 0, len(data)):
            if number != _GRAPH or wire != _BYTES:
                continue
            for inner, kind, start, end in _fields(data, begin, stop):
                if inner == _NODE and kind == _BYTES:
                    nodes.append(_read_node(data, start, end))
                elif inner == _INITIALIZER and kind == _BYTES:
                    tensor = _read_tensor(data, start, end)
                    bits = ELEMENT_BITS.get(tensor.data_type, 0)
                    size = (math.prod(tensor.dims) * bits + 7) // 8
                    constants[tensor.name] = Constant(tuple(tensor.dims), size)
    except OSError as error:
        raise PackageError(f"{path}: cannot be read", found=error.strerror) from error
    except (_DamagedError, UnicodeDecodeError) as error:
        raise PackageError(f"{path}: is no ONNX model", found=error) from error
    return Graph(tuple(nodes), constants)


def _read_node(data: bytes, start: int, end: int) -> Node:
    texts: dict[int, list[str]] = {_INPUT: [], _OUTPUT: [], _NAME: [], _OP_TYPE: []}
    integers: dict[str, int] = {}
    for number, wire, begin, stop in _fields(data, start, end):
        if number in texts and wire == _BYTES:
            texts[number].append(data[begin:stop].decode("utf-8"))
        elif number == _ATTRIBUTE and wire == _BYTES:
            integers.update(_read_integer(data, begin, stop))
    return Node(
        name="".join(texts[_NAME]),
        op_type="".join(texts[_OP_TYPE]),
        inputs=tuple(texts[_INPUT]),
        outputs=tuple(texts[_OUTPUT]),
        integers=integers,
    )


def _read_integer(data: bytes, start: int, end: int) -> dict[str, int]:
    """The attribute by its name if it is a whole number; nothing otherwise."""
    name, value = "", None
    for number, wire, begin, stop in _fields(data, start, end):
        if number == _ATTRIBUTE_NAME and wire == _BYTES:
            name = data[begin:stop].decode("utf-8")
        elif number == _ATTRIBUTE_INT and wire == _VARINT:
            value = _signed(_varint(data, begin, stop)[0])
    return {} if value is None else {name: value}
