"""MXFP4: numbers of four bits (E2M1), 32 of a row with one power of two; how safetensors files hold them.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification" v1.0 (2023), section 5. The two
tensors of a parameter are those of OpenAI's gpt-oss (`gpt_oss/torch/weights.py`).

Legend: E experts, N rows and K columns of a matrix, B = K / 32 blocks a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gguf.quants import MXFP4
from torch import Tensor

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.gguf_bits import Bytes, symmetric
from onnxlm.models.checkpoint.tensors import StoredTensor
from onnxlm.quantized_tensor import QuantizedTensor

BLOCK = 32
_BYTES = BLOCK // 2  # of a block's numbers
# Twice a number of E2M1 is a signed byte of at most 12; codes are 128 above it.
_CODES = np.array(MXFP4.kvalues, np.int8).view(np.uint8) ^ np.uint8(0x80)
_NUMBERS, _POWERS = "_blocks", "_scales"


def decode(numbers: Bytes, powers: Bytes) -> QuantizedTensor:
    """The codes and scales that mean the same, without loss.

    Args:
        numbers: The bits of an E2M1 number a byte, uint8 [N, K].
        powers: Exponents with a bias of 127, uint8 [N, B].
    """
    scale = np.ldexp(np.float32(1), powers.astype(np.int32) - 128)
    return symmetric(_CODES[numbers], 8, BLOCK, scale)


@dataclass(frozen=True)
class StoredBytes(StoredTensor):
    """A tensor of uint8, which is a part of a parameter."""


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors of a checkpoint, those of bytes put together to the parameters that they mean.

    `<name>_blocks` is uint8 [E, N, B, 16], the number of an even column in the low bits of a byte;
    `<name>_scales` is uint8 [E, N, B]. The parameter [E, N, K] takes the first one's name.

    Bytes without such a name stay as they are: what does not need them ignores them.

    Raises:
        CheckpointError: A tensor's partner is missing, or has another shape.
    """
    found = dict(tensors)
    for name, numbers in tensors.items():
        if isinstance(numbers, StoredBytes) and name.endswith(_NUMBERS):
            powers = tensors.get(name.removesuffix(_NUMBERS) + _POWERS)
            found[name] = _parameter(numbers, powers)
            found.pop(name.removesuffix(_NUMBERS) + _POWERS)
    return found


def _parameter(numbers: StoredBytes, powers: StoredTensor | None) -> StoredTensor:
    """What the two mean, read one expert after the other: numbers of a layer fill gigabytes."""
    stored = numbers.shape
    whole = len(stored) == 4 and stored[3] == _BYTES
    if not whole or not isinstance(powers, StoredBytes) or powers.shape != stored[:3]:
        beside = powers.name if powers else "no " + numbers.name.removesuffix(_NUMBERS) + _POWERS
        raise CheckpointError(
            f"{numbers.file}: {numbers.name} is no tensor of MXFP4",
            found=f"{list(stored)} beside {beside} {list(powers.shape) if powers else ''}",
            allowed=f"U8 [experts, rows, blocks, {_BYTES}] beside U8 [experts, rows, blocks]",
            fix="fetch the checkpoint again",
        )
    count, rows, blocks, _ = stored

    def read() -> Tensor:
        values = np.empty((count, rows, BLOCK * blocks), np.float32)
        parts = zip(values, numbers.read().numpy(), powers.read().numpy(), strict=True)
        for own, packed, exponents in parts:
            own[:] = decode(_unpacked(packed), exponents).dequantize()
        return torch.from_numpy(values)

    def codes() -> QuantizedTensor:
        packed = numbers.read().numpy().reshape(count * rows, blocks, _BYTES)
        return decode(_unpacked(packed), powers.read().numpy().reshape(count * rows, blocks))

    return StoredTensor(
        name=numbers.name,
        file=numbers.file,
        shape=(count, rows, BLOCK * blocks),
        nbytes=numbers.nbytes + powers.nbytes,
        read=read,
        quantized=codes,
    )


def _unpacked(packed: Bytes) -> Bytes:
    """[N, B, 16] of two numbers each -> [N, K] of one each."""
    numbers = np.empty((*packed.shape, 2), np.uint8)
    numbers[..., 0], numbers[..., 1] = packed & 15, packed >> 4
    return numbers.reshape(len(packed), -1)
