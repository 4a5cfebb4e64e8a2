"""Metadata of one family in a GGUF file, read strictly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onnxlm.errors import CheckpointError, ConfigError
from onnxlm.models.registry import (
    Architecture,
    GgufFamily,
    architecture_names,
    find_architecture,
)


class FamilyMetadata(Mapping[str, Any]):
    """Keys under one architecture's prefix; a missing one is named in full, an unread one refused.

    Args:
        metadata: All keys of the file.
        prefix: The file's `general.architecture`.
        source: The file, for messages.
    """

    def __init__(self, metadata: Mapping[str, Any], prefix: str, source: str) -> None:
        self._prefix = f"{prefix}."
        self._source = source
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in metadata.items()
            if key.startswith(self._prefix)
        }
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        try:
            return self._values[key]
        except KeyError:
            raise ConfigError(
                f"{self._source}: metadata key {self._prefix}{key} is missing",
                fix="convert the model again with a current llama.cpp",
            ) from None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        self._read.add(key)
        return self._values.get(key, default)

    def only(self, key: str, allowed: object) -> None:
        """Refuse any value of an optional key but one.

        Raises:
            ConfigError: Names the key, its value and the one allowed.
        """
        value = self.get(key, allowed)
        if value != allowed:
            raise ConfigError(
                f"{self._source}: metadata key {self._prefix}{key} is not supported with this value",
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
                found=", ".join(f"{self._prefix}{key}={value!r}" for key, value in unread.items()),
                allowed=", ".join(sorted(self._prefix + key for key in self._read)),
            )


def find_family(metadata: Mapping[str, Any], source: str) -> tuple[Architecture, GgufFamily]:
    """The architecture that reads files of this `general.architecture`, and how its files lie.

    Raises:
        CheckpointError: No architecture does.
    """
    wanted = metadata.get("general.architecture")
    known: list[str] = []
    for name in architecture_names():
        architecture = find_architecture(name)
        if architecture.gguf is None:
            continue
        if architecture.gguf.architecture == wanted:
            return architecture, architecture.gguf
        known.append(architecture.gguf.architecture)
    raise CheckpointError(
        f"{source}: GGUF architecture is not supported",
        found=repr(wanted),
        allowed=", ".join(sorted(known)),
    )
