"""Models in several GGUF files, `<name>-00001-of-00003.gguf` and so on.

Format: llama.cpp, `tools/gguf-split`, keys `split.*` of `gguf-py`. The first file has the metadata of all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gguf.constants import Keys

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.gguf_file import GgufFile, open_gguf
from onnxlm.models.checkpoint.matching import listed

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_REFETCH = "fetch all files again, from the same revision"


def open_shards(path: Path) -> GgufFile:
    """Open a GGUF file, and the others where it is one of several; any of them may be named.

    Raises:
        CheckpointError: A file is missing or damaged, or they do not belong together.
    """
    file = open_gguf(path)
    count = file.metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT, 1)
    if count <= 1:
        return file
    first, *others = (open_gguf(shard) for shard in _paths(path, count))
    tensors = dict(first.tensors)
    elsewhere: dict[str, Path] = {}
    for number, shard in enumerate((first, *others)):
        _check_place(shard, number, count)
    for shard in others:
        twice = tensors.keys() & shard.tensors.keys()
        if twice:
            raise CheckpointError(
                f"{shard.path.name}: tensors that an earlier file holds too",
                found=listed(twice),
                fix=_REFETCH,
            )
        tensors |= shard.tensors
        elsewhere |= dict.fromkeys(shard.tensors, shard.path)
    wanted = first.metadata.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    if wanted != len(tensors):
        raise CheckpointError(
            f"{first.path.name}: tensors in all {count} files",
            found=len(tensors),
            allowed=wanted,
            fix=_REFETCH,
        )
    return GgufFile(first.path, first.metadata, tensors, elsewhere)


def one_a_model(files: Sequence[Path]) -> list[Path]:
    """The first of the files of each model."""
    models: dict[Path, Path] = {}
    for file in files:
        match = _NAME.fullmatch(file.name)
        models.setdefault(file if match is None else _shard(file, match, 1), file)
    return list(models.values())


def _shard(file: Path, match: re.Match[str], number: int) -> Path:
    return file.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}.gguf")


def _paths(path: Path, count: int) -> list[Path]:
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path}: one of {count} files of a model, whose name does not say which",
            allowed=f"<name>-00001-of-{count:05d}.gguf",
            fix="give the files their names back",
        )
    paths = [_shard(path, match, number) for number in range(1, count + 1)]
    absent = [shard.name for shard in paths if not shard.is_file()]
    if absent:
        raise CheckpointError(
            f"{path}: files of this model are missing: {listed(absent)}",
            fix="fetch the missing files",
        )
    return paths


def _check_place(shard: GgufFile, number: int, count: int) -> None:
    said = tuple(
        shard.metadata.get(key)
        for key in (Keys.Split.LLM_KV_SPLIT_NO, Keys.Split.LLM_KV_SPLIT_COUNT)
    )
    if said != (number, count):
        raise CheckpointError(
            f"{shard.path.name}: not the file that its name says",
            found=f"split.no {said[0]}, split.count {said[1]}",
            allowed=f"{number} and {count}",
            fix=_REFETCH,
        )
