"""Sessions over one copy of a package's weights, packed once for this machine and kept in the user's cache.

ONNX Runtime packs weights anew for every session: prefill and decode together would hold two copies. Here
both are opened from files of `prepacked_file`, whose weights are mapped: all sessions of all processes share
one copy. What is packed fits one CPU, one version and one set of options, the key under which it is filed;
ONNX Runtime packs all the same when it opens a file, and takes a stored form only if it equals its own.

The cache only ever saves time and memory. Whatever goes wrong with it, the package's own files are used, and
`PreparedGraphs.reason` says why.

    <cache>/prepacked/<key>/          whole, since it is renamed into place
        prepacked.json                sizes and times of the rest; its own time is that of the last use
        graph-prefill.onnx graph-decode.onnx weights.bin
    <cache>/prepacked/.<key>.tmp-x    being written, under .<key>.lock

A build drops what no session was opened from for 30 days, and what was made of files that have since been
replaced in the same package.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from onnxlm import package_swap
from onnxlm.cache import cache_dir
from onnxlm.errors import OnnxlmError, PackageError
from onnxlm.package import Package
from onnxlm.runtime.prepacked_file import DATA_NAME, write_prepacked
from onnxlm.runtime.providers import find_provider
from onnxlm.runtime.session import SessionConfig, open_session, session_options
from onnxlm.version import VERSION

ENTRY_NAME = "prepacked.json"
# Raise it when files of an older form must not be used any more.
_FORMAT = 1
_UNUSED_S = 30 * 24 * 3600
# A folder that its writer left when it was killed; no build takes that long.
_ABANDONED_S = 24 * 3600
# Of the weights, at the worst moment: raw and packed in the new file, the same of one graph beside it.
_ROOM = 5
_CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "model name", "flags"),  # x86
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),  # Arm
)


@dataclass(frozen=True)
class PreparedGraphs:
    """Which files to open.

    Attributes:
        paths: Graph name -> ONNX file.
        cached: They are optimized and packed for this machine; otherwise they are the package's own.
        reason: Why they are the package's own; None when they are not.
    """

    paths: Mapping[str, Path]
    cached: bool
    reason: str | None = None

    def session_options(self, config: SessionConfig) -> ort.SessionOptions:
        """Options with which the files are to be opened."""
        options = session_options(config)
        if self.cached:
            # Optimized already; a pass that makes a new tensor of a weight would lose its packed form.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options


def open_graphs(
    package: Package, config: SessionConfig
) -> tuple[dict[str, ort.InferenceSession], PreparedGraphs]:
    """A session for every graph of a package, from packed files where that is possible.

    Args:
        package: The package.
        config: Provider, threads and options of the sessions.

    Returns:
        Graph name -> session, and the files that they were opened from.

    Raises:
        ProviderError: The provider is not known, not available, or not the one that a session got.
        PackageError: ONNX Runtime cannot load the package's own files.
    """
    prepared = prepare(package, config)
    if prepared.cached:
        try:
            return open_files(prepared, config), prepared
        except PackageError as error:  # pruned or damaged since: build it anew next time
            _remove(next(iter(prepared.paths.values())).parent)
            prepared = PreparedGraphs(own_files(package), cached=False, reason=str(error))
    return open_files(prepared, config), prepared


def prepare(package: Package, config: SessionConfig) -> PreparedGraphs:
    """The files to open: from the cache, built if need be, or the package's own; never raises an error.

    Args:
        package: The package.
        config: Provider and options of the sessions.
    """
    own = own_files(package)
    try:
        if find_provider(config.provider).ort_name != "CPUExecutionProvider":
            reason = f"provider '{config.provider}' packs no weights"
            return PreparedGraphs(own, cached=False, reason=reason)
        entry = cache_dir() / "prepacked" / _key(package, config)
        if not _is_whole(entry):
            _build(entry, package, own, config)
        with contextlib.suppress(OSError):  # a cache that is only read stays usable
            os.utime(entry / ENTRY_NAME)
        return PreparedGraphs(_cached_files(entry, own), cached=True)
    except Exception as error:  # onnxruntime raises its own classes
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, OnnxlmError) else f"{type(error).__name__}: "
        return PreparedGraphs(own, cached=False, reason=f"{kind}{text}")


def own_files(package: Package) -> dict[str, Path]:
    """The package's own graphs, by name."""
    return {name: package.graph_path(name) for name in package.manifest.graphs}


def _cached_files(entry: Path, own: Mapping[str, Path]) -> dict[str, Path]:
    """Named after the package's files, not its graphs: only names of files are known to be harmless."""
    return {name: entry / f"graph-{path.name}" for name, path in own.items()}


def open_files(prepared: PreparedGraphs, config: SessionConfig) -> dict[str, ort.InferenceSession]:
    """Open all files at once: packing takes one thread a session, and Python's lock is not held."""

    def open_one(path: Path) -> ort.InferenceSession:
        return open_session(path, config, prepared.session_options(config))

    with ThreadPoolExecutor(len(prepared.paths)) as threads:
        sessions = threads.map(open_one, prepared.paths.values())
        return dict(zip(prepared.paths, sessions, strict=True))


def _key(package: Package, config: SessionConfig) -> str:
    facts = {
        "format": _FORMAT,
        "package": package.digest,
        "onnxlm": VERSION,
        "onnxruntime": ort.__version__,
        "cpu": cpu_identity(),
        "provider": config.provider,
        "options": dict(config.options),
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


@functools.cache
def cpu_identity() -> str:
    """What tells apart CPUs for which kernels pack weights differently.

    On Linux the model and its instruction sets, elsewhere what Python knows.
    """
    facts = [sys.platform, platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        facts += _cpu_fields(lines)
    return "\n".join(facts)


def _cpu_fields(lines: Iterator[str]) -> list[str]:
    """The telling lines about the first core."""
    found = []
    for line in lines:
        name, _, value = line.partition(":")
        if not name.strip():
            break
        if name.strip() in _CPU_FIELDS:
            found.append(f"{name.strip()}: {value.strip()}")
    return found


def _is_whole(entry: Path) -> bool:
    """Whether an entry is complete, and its files the ones that were written."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        files = json.loads((entry / ENTRY_NAME).read_text(encoding="utf-8"))["files"]
        return DATA_NAME in files and all(
            _facts(entry / name) == facts for name, facts in files.items()
        )
    return False


def _facts(file: Path) -> list[int]:
    facts = file.stat()
    return [facts.st_size, facts.st_mtime_ns]


def _build(entry: Path, package: Package, own: Mapping[str, Path], config: SessionConfig) -> None:
    """Make `entry`, or nothing; one process builds, others go on without.

    Raises:
        OnnxlmError: Another process builds it, there is no room, or ONNX Runtime refuses.
        OSError: The cache cannot be written.
        ValueError: ONNX Runtime saves graphs in another form than is known here.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with package_swap.writer_lock(entry):
        if _is_whole(entry):  # another process was faster
            return
        for old in (entry, *package_swap.leftovers(entry)[0], *_superseded(entry.parent, package)):
            _remove(old)
        _require_room(entry.parent, package)
        temporary = package_swap.temporary_sibling(entry)
        try:
            made = _cached_files(temporary, own)
            write_prepacked({made[name].name: own[name] for name in own}, temporary, config)
            open_files(PreparedGraphs(made, cached=True), config)  # fails now, not at every load
            _write_entry(temporary, package)
            os.rename(temporary, entry)
        except BaseException:
            _remove(temporary)
            raise


def _require_room(folder: Path, package: Package) -> None:
    needed = _ROOM * package.manifest.weights.bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PackageError(
            f"{folder}: too little room to pack weights", found=free, allowed=f"{needed} bytes free"
        )


def _write_entry(folder: Path, package: Package) -> None:
    """Put the files on the disk, then say what they are: no crash leaves an entry whose data is not there."""
    files = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
        files[file.name] = _facts(file)
    entry = {"package": str(package.path.resolve()), "digest": package.digest, "files": files}
    with (folder / ENTRY_NAME).open("w", encoding="utf-8") as opened:
        json.dump(entry, opened)
        opened.flush()
        os.fsync(opened.fileno())


def _superseded(cache: Path, package: Package) -> Iterator[Path]:
    """Entries that nobody uses, those of replaced files of this package, and what killed writers left."""
    now = time.time()
    path = str(package.path.resolve())
    for folder in cache.iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if ".tmp-" in folder.name:
                if now - folder.stat().st_mtime > _ABANDONED_S:
                    yield folder
                continue
            note = folder / ENTRY_NAME
            entry = json.loads(note.read_text(encoding="utf-8"))
            replaced = entry["package"] == path and entry["digest"] != package.digest
            if replaced or now - note.stat().st_mtime > _UNUSED_S:
                yield folder


def _remove(entry: Path) -> None:
    """Delete a folder, its note first: what is left of it by a kill is never taken for whole."""
    with contextlib.suppress(OSError):
        (entry / ENTRY_NAME).unlink(missing_ok=True)
    shutil.rmtree(entry, ignore_errors=True)
