"""Stored tensors that are cut into parameters, or put together to one, when they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.tensors import StoredTensor
from onnxlm.models.weight_rules import Cut
from onnxlm.quantized_tensor import QuantizedTensor, concatenate


def cut(tensor: StoredTensor, rule: Cut, config: Any) -> list[StoredTensor]:
    """The parameters that one stored tensor holds, in the rule's order.

    Raises:
        CheckpointError: The tensor's shape does not let itself be cut so.
    """
    try:
        shapes = [
            tuple(piece.shape)
            for piece in rule.pieces(torch.empty(tensor.shape, device="meta"), config)
        ]
    except RuntimeError as error:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} cannot be cut into {', '.join(rule.names)}",
            found=f"shape {list(tensor.shape)}",
            fix="correct the config, or fetch the weights that belong to it",
        ) from error

    def reader(index: int) -> Callable[[], Tensor]:
        # Contiguous and of its own: a slice would keep the whole tensor in memory.
        return lambda: rule.pieces(tensor.read(), config)[index].clone(
            memory_format=torch.contiguous_format
        )

    def codes(index: int) -> Callable[[], QuantizedTensor] | None:
        whole = tensor.quantized
        if whole is None or not rule.rows:
            return None

        def cut_codes() -> QuantizedTensor:
            stored = whole()
            numbers = torch.arange(stored.shape[0])
            return stored.rows(rule.pieces(numbers, config)[index].numpy())

        return cut_codes

    nbytes = tensor.nbytes // len(shapes)
    return [
        dataclasses.replace(
            tensor, shape=shape, nbytes=nbytes, read=reader(index), quantized=codes(index)
        )
        for index, shape in enumerate(shapes)
    ]


def stacked(
    name: str, pieces: Mapping[tuple[int, int], StoredTensor], slots: int, source: str
) -> StoredTensor:
    """One parameter [E, slots * rows, columns] of many stored matrices.

    Args:
        name: The parameter.
        pieces: Matrices by (expert, slot).
        slots: Matrices of one expert.
        source: File or folder, for messages.

    Raises:
        CheckpointError: A matrix is missing, or one has another shape than the rest.
    """
    count = max(expert for expert, _ in pieces) + 1
    wanted = {(expert, slot) for expert in range(count) for slot in range(slots)}
    first = next(iter(pieces.values()))
    odd = [tensor for tensor in pieces.values() if tensor.shape != first.shape]
    if len(pieces) != len(wanted) or odd:
        missing = sorted(wanted - pieces.keys())
        found = f"none of expert {missing[0][0]}" if missing else f"{odd[0].name} {odd[0].shape}"
        raise CheckpointError(
            f"{source}: matrices of the experts in {name} do not fit together",
            found=found,
            allowed=f"{slots} for each of {count} experts, like {first.name} {list(first.shape)}",
            fix="fetch the checkpoint again",
        )

    def read() -> Tensor:
        rows = first.shape[0]
        whole: Tensor | None = None
        for (expert, slot), tensor in pieces.items():
            values = tensor.read()
            if whole is None:
                whole = values.new_empty((count, slots * rows, *first.shape[1:]))
            whole[expert, slot::slots] = values
        assert whole is not None
        return whole

    nbytes = sum(tensor.nbytes for tensor in pieces.values())
    shape = (count, slots * first.shape[0], *first.shape[1:])
    ordered = [pieces[place] for place in sorted(wanted)]
    return StoredTensor(first.name, first.file, shape, nbytes, read, _stacked_codes(ordered, slots))


def _stacked_codes(
    pieces: Sequence[StoredTensor], slots: int
) -> Callable[[], QuantizedTensor] | None:
    """Reads the codes of one parameter's matrices, in its order of rows; None where one has none.

    Args:
        pieces: Matrices [N, K] of all slots of the first expert, then those of the next.
        slots: Matrices of one expert.
    """
    readers = [tensor.quantized for tensor in pieces if tensor.quantized is not None]
    if len(readers) < len(pieces):
        return None

    def read() -> QuantizedTensor:
        whole = concatenate([codes() for codes in readers])
        assert whole is not None  # sizes of a file format's blocks divide one another
        if slots == 1:
            return whole
        rows = np.arange(whole.shape[0]).reshape(-1, slots, pieces[0].shape[0])
        return whole.rows(rows.swapaxes(1, 2).reshape(-1))

    return read
