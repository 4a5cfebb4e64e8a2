"""Tensors of a checkpoint that are named and measured, but not read yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from onnxlm.quantized_tensor import QuantizedTensor

# Types of values that a parameter can have, and bytes of an element.
FLOATS: Mapping[str, int] = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file holds it.

    Attributes:
        name: Its name in the file, for messages.
        file: The file's name, for messages.
        shape: Shape of what `read` returns.
        nbytes: Bytes it takes in the file.
        read: Reads the values; block-quantized ones come de-quantized.
        unreadable: The type of its values, where no parameter can have them; a model may not need them.
        quantized: Reads the codes and scales of a block-quantized tensor in exact form; of experts' matrices
            [E, N, K] as [E * N, K].
    """

    name: str
    file: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], Tensor]
    quantized: Callable[[], QuantizedTensor] | None = None
    unreadable: str | None = None


class LazyQuantized(Mapping[str, QuantizedTensor]):
    """Block-quantized tensors by parameter name, unpacked anew at each access.

    Codes take a byte each when unpacked: holding all of them would double a 4-bit file's memory.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._readers = {
            name: tensor.quantized
            for name, tensor in tensors.items()
            if tensor.quantized is not None
        }

    def __getitem__(self, name: str) -> QuantizedTensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)
