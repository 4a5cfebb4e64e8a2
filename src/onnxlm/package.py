"""A package on disk: opened after its files are checked, written whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from onnxlm import package_swap, strict_json
from onnxlm.destination import MANIFEST_PART, check_destination, files_in
from onnxlm.errors import ExportError, PackageError
from onnxlm.external_data import check_external_data
from onnxlm.integrity import check_inside, hash_file, verify_files
from onnxlm.manifest import MANIFEST_NAME, FileSpec, Manifest, is_package, read_manifest

__all__ = ["Package", "PackageWriter", "check_destination", "open_package", "record_figures"]

# How long a reader waits for a writer that has moved the old package aside and not yet the new one in.
_SWAP_WAIT_S = 2.0


@dataclass(frozen=True)
class Package:
    """An opened package.

    Attributes:
        path: Its folder.
        manifest: What it says of itself.
    """

    path: Path
    manifest: Manifest

    def graph_path(self, name: str) -> Path:
        """The ONNX file of graph `name` ("prefill" or "decode").

        Raises:
            PackageError: The package has no such graph.
        """
        graphs = self.manifest.graphs
        if name not in graphs:
            raise PackageError(
                f"{self.path}: has no such graph", found=repr(name), allowed=", ".join(graphs)
            )
        return self.path / graphs[name].file

    @property
    def weights_path(self) -> Path:
        """The external-data file of all graphs."""
        return self.path / self.manifest.weights.file

    @property
    def digest(self) -> str:
        """SHA-256 over names and hashes of all files: the key under which caches file what they derive."""
        lines = (f"{name}\n{spec.sha256}\n" for name, spec in sorted(self.manifest.files.items()))
        return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()

    def has(self, name: str) -> bool:
        """Whether the package holds a file of that relative name."""
        return name in self.manifest.files

    def file_path(self, name: str) -> Path:
        """The file of relative name `name`.

        Raises:
            PackageError: The package has no such file.
        """
        if not self.has(name):
            raise PackageError(f"{self.path / name}: is not a file of this package")
        return self.path / name

    def read_json(self, name: str) -> dict[str, Any]:
        """The JSON object in file `name` ("config.json", ...).

        Raises:
            PackageError: The package has no such file, or it holds no JSON object.
        """
        return strict_json.load_object(self.file_path(name), lenient=True)


def open_package(path: Path | str, verify: str = "auto") -> Package:
    """The package in folder `path`, after every file that it lists was checked.

    Args:
        path: The folder.
        verify: "auto" hashes the files that have changed since they were last hashed on this machine,
            "always" all, "never" none (sizes are checked).

    Raises:
        PackageError: There is no package, or a file of it is missing, cut short or changed.
    """
    path = Path(path)
    if not is_package(path):
        _await_swap(path)
    if not path.is_dir():
        raise PackageError(f"{path}: is no package", found="no such folder")
    if not is_package(path):
        raise PackageError(
            f"{path}: is no package",
            found=f"a folder without {MANIFEST_NAME}",
            fix="export one first",
        )
    manifest = read_manifest(path)
    graphs = {graph.file for graph in manifest.graphs.values()}
    # Tensors may lie in the one weight file, beside the graph, and nowhere else.
    sizes = {manifest.weights.file: manifest.weights.bytes}

    def inspect(name: str) -> None:
        if name in graphs:
            check_external_data(path / name, sizes)

    verify_files(path, manifest.files, verify, inspect)
    return Package(path, manifest)


def record_figures(
    path: Path | str,
    *,
    quality: Mapping[str, float] | None = None,
    parity: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write measured figures into the manifest of a package in place; its other files are not touched.

    Args:
        path: The package's folder.
        quality: Replaces the field `quality`; None leaves it.
        parity: Replaces the field `parity`; None leaves it.

    Returns:
        The new manifest.

    Raises:
        PackageError: There is no package, its manifest is damaged, or a figure is no finite number.
        ExportError: Another process is writing the package, or the manifest cannot be written.
    """
    folder = Path(path).resolve()
    given = {"quality": quality, "parity": parity}
    fields: dict[str, Any] = {
        name: dict(figures) for name, figures in given.items() if figures is not None
    }
    read_manifest(folder)  # no lock beside what is no package
    try:
        with package_swap.writer_lock(folder):
            manifest = dataclasses.replace(read_manifest(folder), **fields)
            _write_manifest(folder, manifest)
    except OSError as error:
        raise ExportError(
            f"{folder / MANIFEST_NAME}: cannot be written", found=error.strerror
        ) from error
    return manifest


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put the manifest in place at once: a reader finds the old one or the new one."""
    part = folder / MANIFEST_PART
    try:
        part.write_text(manifest.to_json(), encoding="utf-8")
        _flush(part)
        os.replace(part, folder / MANIFEST_NAME)
    finally:
        part.unlink(missing_ok=True)
    _flush(folder)


def _await_swap(path: Path) -> None:
    """Where a writer was killed between two renames, finish its work; wait for one that is alive."""
    destination = path.resolve()
    deadline = time.monotonic() + _SWAP_WAIT_S
    while not destination.exists() and package_swap.leftovers(destination)[1]:
        with contextlib.suppress(ExportError, OSError), package_swap.writer_lock(destination):
            package_swap.recover(destination)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


class PackageWriter:
    """Context manager that writes a package into a temporary folder and puts it in place when whole.

    Write files below `path`, then call `finish`. Until `finish` returns, `destination` is what it was; an
    exception or an interrupt before it leaves nothing behind.

    Args:
        destination: A new name, an empty folder, or a package, which is replaced.
    """

    def __init__(self, destination: Path | str) -> None:
        self._given = destination
        self._cleanup = contextlib.ExitStack()
        self._finished = False
        self.destination: Path
        self.path: Path

    def __enter__(self) -> PackageWriter:
        """Make the temporary folder.

        Raises:
            ExportError: `check_destination` refuses the place, or another process writes it.
        """
        with contextlib.ExitStack() as stack:
            self.destination = check_destination(self._given)
            parent = self.destination.parent
            made = [p for p in (parent, *parent.parents) if not p.exists()]
            stack.callback(_remove_empty, made)
            parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(package_swap.writer_lock(self.destination))
            package_swap.recover(self.destination)
            self.path = package_swap.temporary_sibling(self.destination)
            stack.callback(package_swap.remove_package, self.path)
            self._cleanup = stack.pop_all()
        return self

    def finish(self, manifest: Manifest) -> Package:
        """Write the manifest, with every file's size and hash, and put the package in place.

        Args:
            manifest: The manifest; `files` and the size of the weights are filled in here.

        Returns:
            The package at `destination`.

        Raises:
            PackageError: The manifest contradicts itself or the files.
            ExportError: The old package cannot be replaced.
        """
        files = self._hash_files()
        weights = manifest.weights
        if weights.file in files:
            weights = dataclasses.replace(weights, bytes=files[weights.file].bytes)
        manifest = dataclasses.replace(manifest, files=files, weights=weights)
        manifest.check(str(self.path / MANIFEST_NAME))
        for name in files:
            _flush(self.path / name)
        _write_manifest(self.path, manifest)
        package_swap.swap_in(self.path, self.destination)
        self._finished = True
        _flush(self.destination.parent)
        return Package(self.destination, manifest)

    def _hash_files(self) -> dict[str, FileSpec]:
        files: dict[str, FileSpec] = {}
        for path in files_in(self.path):
            name = path.relative_to(self.path).as_posix()
            check_inside(self.path, name)
            files[name] = hash_file(path)
        return files

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Delete the temporary folder, if it still is one.

        Raises:
            ExportError: The disk was full.
        """
        self._cleanup.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ExportError(
                f"{self.destination}: cannot be written",
                found=error.strerror,
                fix="free some space on that disk",
            ) from error
        if error is None and not self._finished:
            raise RuntimeError("a PackageWriter was left without a call of finish()")


def _remove_empty(folders: list[Path]) -> None:
    """Remove the folders, innermost first, as far as they are empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _flush(path: Path) -> None:
    """Have the system put a file, or the names in a folder, on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folder, and orders renames itself
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
