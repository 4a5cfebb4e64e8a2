"""Metadata of one family in a GGUF file, read strictly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from gguf.constants import Keys

from onnxlm.errors import CheckpointError, ConfigError
from onnxlm.models.checkpoint.gguf_file import GgufFile, stored_tensor
from onnxlm.models.registry import (
    Architecture,
    GgufFamily,
    architecture_names,
    find_architecture,
)


class FamilyMetadata(Mapping[str, Any]):
    """Keys under one architecture's prefix; a missing one is named in full, an unread one refused.

    Keys are asked for as `gguf.constants.Keys` spells them: "{arch}.block_count".

    Args:
        file: The file.
        architecture: Its `general.architecture`.
    """

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._architecture = architecture
        self._file = file
        self._source = file.path.name
        prefix = f"{architecture}."
        self._values = {
            key: value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        self._read: set[str] = set()
        self._vectors: set[str] = set()

    @property
    def vectors(self) -> Set[str]:
        """Tensors that have been read as metadata."""
        return self._vectors

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name: the metadata does not say what has biases."""
        return tensor in self._file.tensors

    def rows(self, tensor: str) -> int:
        """Rows of a matrix that the file must have.

        Raises:
            CheckpointError: There is none of that name.
        """
        if not self.has(tensor):
            raise CheckpointError(
                f"{self._source}: tensors are missing: {tensor}", fix="fetch the file again"
            )
        return int(self._file.tensors[tensor].shape[-1])

    def vector(self, tensor: str) -> list[float] | None:
        """A tensor that says what other formats write into the config; None where there is none."""
        if not self.has(tensor):
            return None
        self._vectors.add(tensor)
        values: list[float] = stored_tensor(self._file, self._file.tensors[tensor]).read().tolist()
        return values

    def _full(self, key: str) -> str:
        full = key.format(arch=self._architecture)
        self._read.add(full)
        return full

    def __getitem__(self, key: str) -> Any:
        full = self._full(key)
        try:
            return self._values[full]
        except KeyError:
            raise ConfigError(
                f"{self._source}: metadata key {full} is missing",
                fix="convert the model again with a current llama.cpp",
            ) from None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        return self._values.get(self._full(key), default)

    def only(self, key: str, allowed: object) -> None:
        """Refuse any value of an optional key but one.

        Raises:
            ConfigError: Names the key, its value and the one allowed.
        """
        value = self.get(key, allowed)
        if value != allowed:
            raise ConfigError(
                f"{self._source}: metadata key {self._full(key)} is not supported with this value",
                found=repr(value),
                allowed=repr(allowed),
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def finish(self) -> None:
        """Refuse keys that nothing has read: what changes numbers is never ignored.

        Raises:
            ConfigError: Names the unread keys.
        """
        unread = {
            key: value for key, value in self._values.items() if key not in self._read and value
        }
        if unread:
            raise ConfigError(
                f"{self._source}: metadata that this architecture does not read",
                found=", ".join(f"{key}={value!r}" for key, value in unread.items()),
                allowed=", ".join(sorted(self._read)),
            )


def find_family(file: GgufFile) -> tuple[Architecture, GgufFamily, FamilyMetadata]:
    """The architecture that reads a file, how its files lie, and the metadata that it reads.

    Raises:
        CheckpointError: No architecture reads this `general.architecture`.
    """
    wanted = file.metadata.get(Keys.General.ARCHITECTURE)
    known: set[str] = set()
    for name in architecture_names():
        architecture = find_architecture(name)
        family = architecture.gguf
        if family is None:
            continue
        own = FamilyMetadata(file, family.architecture)
        if family.architecture == wanted and family.applies(own):
            return architecture, family, own
        known.add(family.architecture)
    raise CheckpointError(
        f"{file.path.name}: GGUF architecture is not supported",
        found=repr(wanted),
        allowed=", ".join(sorted(known)),
    )
