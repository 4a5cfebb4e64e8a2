"""May a package be written here: asked before any long work."""

from __future__ import annotations

import os
from pathlib import Path

from onnxlm import package_swap
from onnxlm.errors import ExportError, PackageError
from onnxlm.manifest import MANIFEST_NAME, is_package, read_manifest

# Files that desktops leave in any folder.
_CLUTTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})
# A manifest while it is written; what a killed process leaves of one is no reason to refuse.
MANIFEST_PART = f"{MANIFEST_NAME}.part"


def check_destination(path: Path | str) -> Path:
    """Refuse, before any long work, a place where no package can be written. Nothing is left there.

    Args:
        path: A new name, an empty folder, or a package, which will be replaced.

    Returns:
        The absolute path, links resolved.

    Raises:
        ExportError: It is a file, a folder with other things in it, or cannot be written.
    """
    destination = Path(path).resolve()
    if destination in (Path.cwd(), Path(destination.anchor)):
        raise ExportError(
            f"{path}: is the current folder or the root, which cannot be replaced",
            fix="name a new folder",
        )
    if destination.exists():
        _check_replaceable(destination)
    parent = destination.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise ExportError(f"{destination}: cannot be made", found=f"{parent} is a file")
    # Asking for permission is no answer on network shares and on Windows; trying is.
    probe = package_swap.sibling(parent / destination.name, "tmp")
    try:
        probe.mkdir()
    except OSError as error:
        raise ExportError(
            f"{destination}: cannot be written",
            found=error.strerror,
            fix=f"choose another folder, or make {parent} writable",
        ) from error
    package_swap.remove_package(probe)
    return destination


def _check_replaceable(destination: Path) -> None:
    """Refuse to replace what is neither an empty folder nor purely a package."""
    if not destination.is_dir():
        raise ExportError(
            f"{destination}: is a file", allowed="a new or empty folder, or a package"
        )
    try:
        names = {p.relative_to(destination).as_posix() for p in files_in(destination)}
    except OSError as error:
        raise ExportError(f"{destination}: cannot be read", found=error.strerror) from error
    if not is_package(destination):
        if any(destination.iterdir()):
            raise ExportError(
                f"{destination}: is a non-empty folder that is no package",
                found=", ".join(sorted(names)[:3]) or "folders",
                allowed="a new or empty folder, or a package",
            )
        return
    try:
        listed = read_manifest(destination).files
    except PackageError as error:
        raise ExportError(
            f"{destination}: holds a package that cannot be read, so it is not replaced",
            found=f"({error})",
            fix="delete the folder first",
        ) from error
    strangers = sorted(n for n in names - listed.keys() if n.rpartition("/")[2] not in _CLUTTER)
    strangers = [name for name in strangers if name not in (MANIFEST_NAME, MANIFEST_PART)]
    if strangers:
        raise ExportError(
            f"{destination}: holds files that are no part of the package there, so it is not replaced",
            found=", ".join(strangers[:3]),
            fix="move them away first",
        )


def files_in(folder: Path) -> list[Path]:
    """Everything below `folder` that is no folder, links not followed."""
    found = [
        Path(base) / name
        for base, folders, files in os.walk(folder, onerror=_raise)
        for name in (*files, *(f for f in folders if (Path(base) / f).is_symlink()))
    ]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error
