"""Things found by the name of their file: a folder is a registry, and a new file in it is a new entry."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

from onnxlm.errors import OnnxlmError

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The entries of one folder.

    Attributes:
        package: The folder's module.
        attribute: Name of the one object that each file exposes.
        kind: Its type.
        refused: What is said of a name that has no file.
        error: The class of that error.
    """

    package: str
    attribute: str
    kind: type[T]
    refused: str
    error: Callable[..., OnnxlmError]

    def names(self) -> list[str]:
        """Names of the files, but those that begin with an underscore."""
        package: ModuleType = importlib.import_module(self.package)
        found = pkgutil.iter_modules(package.__path__)
        return sorted(m.name for m in found if not m.name.startswith("_"))

    def find(self, name: str) -> T:
        """The object of file `name`.

        Raises:
            OnnxlmError: There is no such file, as `error`; a broken file raises its own error.
        """
        names = self.names()
        if name not in names:
            raise self.error(self.refused, found=repr(name), allowed=", ".join(names))
        found = getattr(importlib.import_module(f"{self.package}.{name}"), self.attribute)
        if not isinstance(found, self.kind):
            raise TypeError(f"{self.package}.{name}.{self.attribute} is no {self.kind.__name__}")
        return found
