"""Are the files of a package the ones its manifest lists: sizes and SHA-256, remembered in stamps.

A stamp is a note in the user's cache folder: this file, with this size, times and inode, had this SHA-256.
A package that was verified once costs a few `stat` calls until one of its files changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from onnxlm.cache import cache_dir
from onnxlm.errors import PackageError
from onnxlm.manifest import FileSpec
from onnxlm.whole_file import write_whole

VERIFY_MODES = ("auto", "always", "never")

_LFS_START = b"version https://git-lfs.github.com/spec/"
_LFS_MOST_BYTES = 1024
# A file written within the clock tick of an earlier write keeps its times (FAT: 2 s), so a stamp is made only
# for files that had rested this long when they were hashed.
_REST_NS = 2_000_000_000

# What tells a changed file without reading it: size, modification time, inode, change time.
_Facts = tuple[int, int, int, int]


def hash_file(path: Path) -> FileSpec:
    """Size and SHA-256 of a regular file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileSpec(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is the small text that Git LFS leaves in place of data it has not fetched."""
    if path.stat().st_size > _LFS_MOST_BYTES:
        return False
    with path.open("rb") as file:
        return file.read(len(_LFS_START)) == _LFS_START


def check_inside(root: Path, name: str) -> os.stat_result:
    """Refuse a file of a package that is not a plain file of its own inside the folder.

    Links are refused, hard ones too: through them a package would read what lies elsewhere.

    Args:
        root: The package's folder.
        name: Relative name that `check_file_name` has let through.

    Returns:
        What `lstat` says of the file.

    Raises:
        PackageError: The file is missing, a link, no regular file, or below a link.
    """
    path = root
    parts = name.split("/")
    for depth, part in enumerate(parts):
        path = path / part
        try:
            facts = path.lstat()
        except OSError as error:
            raise PackageError(
                f"{root / name}: cannot be read",
                found=error.strerror or type(error).__name__,
                fix="copy the package again, with all its files",
            ) from error
        last = depth == len(parts) - 1
        link = stat.S_ISLNK(facts.st_mode)
        if link or (stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1):
            raise PackageError(
                f"{path}: is no file of its own",
                found="a symbolic link" if link else "a hard link",
                allowed="plain files inside the package's folder",
                fix="copy the package with its links followed (cp -rL)",
            )
        if not (stat.S_ISREG(facts.st_mode) if last else stat.S_ISDIR(facts.st_mode)):
            raise PackageError(f"{path}: is no {'regular file' if last else 'folder'}")
    return facts


def verify_files(
    root: Path,
    files: Mapping[str, FileSpec],
    verify: str = "auto",
    inspect: Callable[[str], None] | None = None,
) -> None:
    """Compare the files in `root` with the sizes and hashes listed for them.

    Args:
        root: The package's folder.
        files: Relative name -> size and SHA-256.
        verify: "always" hashes every file, "auto" those without a valid stamp, "never" none: sizes and
            kinds of file are checked all the same.
        inspect: Called with the name of each file that no stamp vouches for; what it raises passes through,
            and no stamp is made.

    Raises:
        PackageError: Names the first file that is missing or differs, with what was found and expected.
    """
    if verify not in VERIFY_MODES:
        raise ValueError(f"verify is {verify!r}, not one of {VERIFY_MODES}")
    known = {name: check_inside(root, name) for name in files}
    for name, facts in known.items():
        if facts.st_size != files[name].bytes:
            raise _differs(root / name, f"{facts.st_size} bytes", f"{files[name].bytes} bytes")
    stamps = _read_stamps(root) if verify == "auto" else {}
    fresh: dict[str, tuple[_Facts, str]] = {}
    for name, spec in files.items():
        stamp = (_facts(known[name]), spec.sha256)
        if stamps.get(name) != stamp:
            began = time.time_ns()
            if verify != "never":
                _verify_hash(root / name, spec)
            if inspect is not None:
                inspect(name)
            if began - known[name].st_mtime_ns < _REST_NS:
                continue
        fresh[name] = stamp
    if verify != "never" and fresh != stamps:
        _write_stamps(root, fresh)


def _verify_hash(path: Path, spec: FileSpec) -> None:
    try:
        found = hash_file(path)
    except OSError as error:
        raise PackageError(
            f"{path}: cannot be read", found=error.strerror or type(error).__name__
        ) from error
    if found != spec:
        raise _differs(path, f"SHA-256 {found.sha256}", f"SHA-256 {spec.sha256}")


def _differs(path: Path, found: str, expected: str) -> PackageError:
    if is_lfs_pointer(path):
        return PackageError(
            f"{path}: is a Git LFS pointer, not the data",
            found=found,
            allowed=expected,
            fix="run `git lfs pull` in the package's folder",
        )
    return PackageError(
        f"{path}: is not the file that the manifest lists",
        found=found,
        allowed=expected,
        fix="copy or export the package again",
    )


def _facts(facts: os.stat_result) -> _Facts:
    return facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns


def _stamp_file(root: Path) -> Path:
    key = hashlib.sha256(str(root.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_dir() / "verified" / f"{key[:32]}.json"


def _read_stamps(root: Path) -> dict[str, tuple[_Facts, str]]:
    # Whatever is wrong with a stamp costs one hashing, never an error.
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        raw = json.loads(_stamp_file(root).read_text(encoding="utf-8"))["files"]
        return {
            name: ((size, mtime, inode, ctime), sha256)
            for name, (size, mtime, inode, ctime, sha256) in raw.items()
        }
    return {}


def _write_stamps(root: Path, stamps: Mapping[str, tuple[_Facts, str]]) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written is no fault of the package
        target = _stamp_file(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        files = {name: [*facts, sha256] for name, (facts, sha256) in stamps.items()}
        write_whole(target, json.dumps({"folder": str(root), "files": files}))
