"""Tensors of safetensors files, single or in shards with an index.

Format: huggingface/safetensors, `README.md` ("Format"); the index is transformers'
`model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.folder import inside, read_json, refuse_pointer
from onnxlm.models.checkpoint.matching import listed
from onnxlm.models.checkpoint.mxfp4 import StoredBytes, joined
from onnxlm.models.checkpoint.tensors import FLOATS, StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BYTES = "U8"  # parts of parameters, see `mxfp4`
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_REFETCH = "fetch the file again"


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights of this format, or an index of them."""
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def read_folder(folder: Path) -> tuple[dict[str, StoredTensor], list[Path]]:
    """Every tensor of a folder's safetensors files, and those files.

    Raises:
        CheckpointError: A file is absent, cut, a pointer, outside the folder, or disagrees with the index.
    """
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        path = _single(folder)
        return read_file(path), [path]
    tensors, files = _read_shards(folder)
    return joined(tensors), files


def _single(folder: Path) -> Path:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in names or len(names) == 1:
        return inside(folder, SINGLE if SINGLE in names else names[0])
    if names:
        raise CheckpointError(
            f"{folder}: several weight files and no index that says what each holds",
            found=listed(names),
            fix=f"fetch {INDEX} too",
        )
    pickles = [path.name for path in folder.iterdir() if path.suffix in _PICKLES]
    if pickles:
        raise CheckpointError(
            f"{folder}: only pickled weights, which can run code when they are read",
            found=listed(pickles),
            allowed="safetensors",
            fix="convert with transformers: save_pretrained(folder)",
        )
    raise CheckpointError(f"{folder}: no weights", allowed=f"{SINGLE}, or {INDEX} with its shards")


def _read_shards(folder: Path) -> tuple[dict[str, StoredTensor], list[Path]]:
    index = inside(folder, INDEX)
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{index}: field 'weight_map' is not a table of file names")
    promised: dict[str, set[str]] = {}
    for tensor, shard in table.items():
        promised.setdefault(shard, set()).add(tensor)
    paths = {shard: inside(folder, shard) for shard in sorted(promised)}
    absent = [shard for shard, path in paths.items() if not path.is_file()]
    if absent:
        lost = [tensor for shard in absent for tensor in promised[shard]]
        raise CheckpointError(
            f"{folder}: weight files are missing: {listed(absent)}",
            found=f"no file for {len(lost)} tensors: {listed(lost)}",
            fix="fetch the missing files",
        )
    tensors: dict[str, StoredTensor] = {}
    for shard, path in paths.items():
        held = _read_tensors(path)
        _compare(shard, promised[shard], held)
        tensors |= held
    return tensors, [index, *paths.values()]


def _compare(shard: str, promised: set[str], held: Mapping[str, StoredTensor]) -> None:
    lacking, surplus = promised - held.keys(), held.keys() - promised
    if lacking:
        raise CheckpointError(
            f"{shard}: tensors that {INDEX} places in this file are missing: {listed(lacking)}",
            fix=_REFETCH,
        )
    if surplus:
        raise CheckpointError(
            f"{shard}: tensors that {INDEX} does not place in this file",
            found=listed(surplus),
            fix="fetch the index and the weight files from the same revision",
        )


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file, its values left in the file.

    Raises:
        CheckpointError: The file is a pointer, damaged or cut short.
    """
    return joined(_read_tensors(path))


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The same, bytes not put together yet: their parts may lie in several files."""
    refuse_pointer(path)
    _check_size(path)
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: the safetensors file is damaged", found=str(error), fix=_REFETCH
        ) from error
    tensors: dict[str, StoredTensor] = {}
    for name in file.keys():  # noqa: SIM118, a safe_open handle is no mapping
        view = file.get_slice(name)
        dtype, shape = view.get_dtype(), tuple(view.get_shape())
        kind = StoredBytes if dtype == BYTES else StoredTensor
        tensors[name] = kind(
            name=name,
            file=path.name,
            shape=shape,
            nbytes=math.prod(shape) * FLOATS.get(dtype, 1),
            read=_reader(file.get_tensor, name),
            unreadable=None if dtype in FLOATS else dtype,
        )
    return tensors


def _reader(get: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    # A copy: the library's tensor is a view of a map of the file that all later reads would share, so
    # that changing a loaded model would change what the checkpoint says next.
    return lambda: get(name).clone()


def _check_size(path: Path) -> None:
    """Say how many bytes are missing: the library only says that something is invalid."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        needed = 8 + header_bytes
        if needed <= size:
            try:
                header = json.loads(file.read(header_bytes))
                needed += max(
                    (
                        entry["data_offsets"][1]
                        for name, entry in header.items()
                        if name[:2] != "__"
                    ),
                    default=0,
                )
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise CheckpointError(
                    f"{path}: the safetensors header is damaged", found=str(error), fix=_REFETCH
                ) from error
    if needed > size:
        raise CheckpointError(
            f"{path}: the safetensors file is cut short",
            found=f"{size} bytes",
            allowed=f"{needed} bytes by its header",
            fix=_REFETCH,
        )
