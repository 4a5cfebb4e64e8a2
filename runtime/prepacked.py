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
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from onnxlm import io_spec, package_swap
from onnxlm.cache import cache_dir
from onnxlm.errors import OnnxlmError, PackageError
from onnxlm.package import Package
from onnxlm.runtime.memory_release import release_pages
from onnxlm.runtime.prepacked_entry import (
    Note,
    mark_used,
    read_note,
    remove_entry,
    superseded,
    write_note,
)
from onnxlm.runtime.prepacked_file import DATA_NAME, FATAL_ONLY, write_prepacked
from onnxlm.runtime.providers import find_provider
from onnxlm.runtime.session import SessionConfig, open_session, session_options
from onnxlm.version import VERSION

# Raise it when files of an older form must not be used any more.
_FORMAT = 1
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
        raw_offsets: Where in the data file of cached graphs tensors lie that are not packed.
    """

    paths: Mapping[str, Path]
    cached: bool
    reason: str | None = None
    raw_offsets: tuple[int, ...] = ()

    def session_options(self, config: SessionConfig) -> ort.SessionOptions:
        """Options with which the files are to be opened."""
        options = session_options(config)
        if self.cached:
            # Optimized already; a pass that makes a new tensor of a weight would lose its packed form.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = FATAL_ONLY  # what fails here is raised, and then made good
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
            remove_entry(next(iter(prepared.paths.values())).parent)
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
        note = read_note(entry) or _build(entry, package, own, config)
        mark_used(entry)
        files = _cached_files(entry, own)
        return PreparedGraphs(files, cached=True, raw_offsets=note.raw_offsets)
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

    def open_one(name: str, path: Path) -> ort.InferenceSession:
        # Only steps of one shape can be recorded.
        capture = config.graph_capture and name == io_spec.DECODE
        return open_session(
            path,
            dataclasses.replace(config, graph_capture=capture),
            prepared.session_options(config),
        )

    with ThreadPoolExecutor(len(prepared.paths)) as threads:
        opened = threads.map(open_one, prepared.paths, prepared.paths.values())
        sessions = dict(zip(prepared.paths, opened, strict=True))
    if prepared.cached:
        data = next(iter(prepared.paths.values())).with_name(DATA_NAME)
        release_pages(data, prepared.raw_offsets)
    return sessions


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
def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What tells apart CPUs for which kernels pack weights differently.

    On Linux the first core's model and instruction sets, elsewhere what Python knows.

    Args:
        cpuinfo: The kernel's description of the processors.
    """
    facts = [sys.platform, platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in itertools.takewhile(str.strip, lines):
            name, _, value = line.partition(":")
            if name.strip() in _CPU_FIELDS:
                facts.append(f"{name.strip()}: {value.strip()}")
    return "\n".join(facts)


def _build(entry: Path, package: Package, own: Mapping[str, Path], config: SessionConfig) -> Note:
    """Make `entry`, or nothing; one process builds, others go on without.

    Raises:
        OnnxlmError: Another process builds it, there is no room, or ONNX Runtime refuses.
        OSError: The cache cannot be written.
        ValueError: ONNX Runtime saves graphs in another form than is known here.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with package_swap.writer_lock(entry):
        note = read_note(entry)
        if note is not None:  # another process was faster
            return note
        for old in (entry, *package_swap.leftovers(entry)[0], *superseded(entry.parent, package)):
            remove_entry(old)
        _require_room(entry.parent, package)
        temporary = package_swap.temporary_sibling(entry)
        try:
            made = _cached_files(temporary, own)
            sources = {made[name].name: own[name] for name in own}
            offsets = write_prepacked(sources, temporary, config)
            open_files(PreparedGraphs(made, cached=True), config)  # fails now, not at every load
            note = Note(str(package.path.resolve()), package.digest, offsets)
            write_note(temporary, note)
            os.rename(temporary, entry)
        except BaseException:
            remove_entry(temporary)
            raise
    return note


def _require_room(folder: Path, package: Package) -> None:
    needed = _ROOM * package.manifest.weights.bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PackageError(
            f"{folder}: too little room to pack weights", found=free, allowed=f"{needed} bytes free"
        )
