"""Files of a checkpoint folder: nothing outside the folder is ever read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onnxlm.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"


def inside(folder: Path, name: str) -> Path:
    """The path of a file that a checkpoint names.

    Args:
        folder: The checkpoint's folder.
        name: A path relative to it, as the checkpoint spells it.

    Raises:
        CheckpointError: The path, or the symbolic link behind it, leaves the folder.
    """
    path = folder / name
    resolved = path.resolve()
    roots = [folder.resolve()]
    # In the Hub's cache a snapshot is links into the same repository's blobs.
    if folder.resolve().parent.name == "snapshots":
        roots.append(folder.resolve().parent.parent / "blobs")
    lexical = Path(name)
    climbs = lexical.is_absolute() or ".." in lexical.parts
    if climbs or not any(resolved.is_relative_to(root) for root in roots):
        raise CheckpointError(
            f"{folder}: a file of the checkpoint leaves its folder",
            found=f"{name!r}" + ("" if climbs else f" linked to {resolved}"),
            fix="put the file into the folder and name it relative to it",
        )
    return path


def refuse_pointer(path: Path) -> None:
    """Refuse a Git-LFS pointer that stands where a file should be.

    Raises:
        CheckpointError: The file is such a pointer.
    """
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{path}: a Git-LFS pointer stands in place of the file",
                found=f"{path.stat().st_size} bytes of text",
                fix="run `git lfs pull` in the checkpoint's repository",
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a UTF-8 file.

    Raises:
        CheckpointError: The file is a pointer, not UTF-8, not JSON, or not an object.
    """
    refuse_pointer(path)
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: not UTF-8 text", found=f"byte {error.start}", fix="save the file as UTF-8"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON", found=str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object", found=type(value).__name__)
    return value
