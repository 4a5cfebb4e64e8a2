"""Whatever goes wrong with packed graphs, the package's own files are used and the results are right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.packed_graphs import (
    CONFIG,
    assert_same,
    entry_of,
    outputs,
    own_outputs,
    write_package,
)

from onnxlm import package_swap
from onnxlm.errors import PackageError
from onnxlm.package import Package
from onnxlm.runtime import prepacked, prepacked_entry, prepacked_file
from onnxlm.runtime.prepacked import PreparedGraphs, open_graphs, own_files, prepare
from onnxlm.runtime.session import SessionConfig


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed graphs, empty."""
    monkeypatch.setenv("ONNXLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepacked"


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "model")


def assert_falls_back(package: Package, reason: str) -> None:
    """The package's own files are used, results are right, and `reason` is part of what is said."""
    sessions, prepared = open_graphs(package, CONFIG)
    assert not prepared.cached
    assert prepared.paths == own_files(package)
    assert reason in str(prepared.reason)
    assert "\n" not in str(prepared.reason)
    assert_same(outputs(sessions), own_outputs(package))


def no_build(*_: Any) -> None:
    raise AssertionError("was built again")


def cut(entry: Path) -> None:
    with (entry / "weights.bin").open("r+b") as file:
        file.truncate(1000)


def change_graph(entry: Path) -> None:
    path = entry / "graph-decode.onnx"
    path.write_bytes(bytes(path.stat().st_size))


def cut_note(entry: Path) -> None:
    note = entry / "prepacked.json"
    note.write_bytes(note.read_bytes()[:-20])


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        change_graph,
        cut_note,
        lambda entry: (entry / "graph-prefill.onnx").unlink(),
        lambda entry: (entry / "prepacked.json").unlink(),
        lambda entry: (entry / "prepacked.json").write_text("[]", encoding="utf-8"),
        lambda entry: os.utime(entry / "weights.bin", (0, 0)),
    ],
    ids=["cut", "graph", "note cut", "no graph", "no note", "note of another kind", "other time"],
)
def test_a_damaged_entry_is_built_anew(package: Package, damage: Callable[[Path], None]) -> None:
    entry = entry_of(prepare(package, CONFIG))
    damage(entry)
    sessions, prepared = open_graphs(package, CONFIG)
    assert entry_of(prepared) == entry
    assert_same(outputs(sessions), own_outputs(package))


def test_packed_weights_that_do_not_fit_are_never_used(package: Package) -> None:
    """A bit that flipped on the disk: ONNX Runtime compares packed weights with what it would have made."""
    entry = entry_of(prepare(package, CONFIG))
    data = entry / "weights.bin"
    times = data.stat().st_atime_ns, data.stat().st_mtime_ns
    graph = onnx.load(entry / "graph-decode.onnx", load_external_data=False).graph
    (matrix,) = (tensor for tensor in graph.initializer if tensor.name == "matrix")
    (packed,) = (e.value for e in matrix.external_data if e.key.startswith("prepacked"))
    with data.open("r+b") as file:
        file.seek(int(packed.split("|")[1].split(";")[0]))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(data, ns=times)
    assert_falls_back(package, "onnxruntime cannot load it")
    assert not entry.exists()
    sessions, prepared = open_graphs(package, CONFIG)
    assert prepared.cached
    assert_same(outputs(sessions), own_outputs(package))


def test_an_entry_that_vanishes_before_it_is_opened(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(package, CONFIG)
    shutil.rmtree(entry_of(prepared))
    monkeypatch.setattr(prepacked, "prepare", lambda *_: prepared)
    assert_falls_back(package, "onnxruntime cannot load it")


def test_a_cache_that_cannot_be_written(package: Package, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be", encoding="utf-8")
    assert_falls_back(package, str(cache.parent))


def test_a_cache_that_can_only_be_read(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    first = prepare(package, CONFIG)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    assert prepare(package, CONFIG) == first


def test_a_full_disk(package: Package, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert_falls_back(package, "too little room to pack weights; found 1000; allowed: ")
    assert list(cache.iterdir()) == []


def fail_to_write(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def refuse_to_save(*_: Any) -> None:
    raise PackageError("onnxruntime cannot load it")


def save_something_else(graph: Path, optimized: Path, weights: Path, config: SessionConfig) -> None:
    shutil.copy(graph, optimized)
    weights.write_bytes(b"x")


@pytest.mark.parametrize(
    ("place", "fault", "reason"),
    [
        ((prepacked, "write_note"), fail_to_write, "No space left"),
        ((prepacked_file, "_save_optimized"), refuse_to_save, "onnxruntime cannot load it"),
        ((prepacked_file, "_save_optimized"), save_something_else, "a tensor lies outside"),
    ],
    ids=["disk full", "not supported", "another form"],
)
def test_a_build_that_fails_leaves_nothing(
    cache: Path,
    package: Package,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[Any, str],
    fault: Callable[..., None],
    reason: str,
) -> None:
    monkeypatch.setattr(*place, fault)
    assert_falls_back(package, reason)
    assert list(cache.iterdir()) == []


def test_an_interrupted_build_leaves_nothing(
    package: Package, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepacked, "write_note", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(package, CONFIG)
    assert list(cache.iterdir()) == []


PREPARE = """
import os, sys
from onnxlm.package import open_package
from onnxlm.runtime import prepacked
from onnxlm.runtime.session import SessionConfig

if sys.argv[2] == "die":
    prepacked.write_note = lambda *_: os._exit(9)
sessions, prepared = prepacked.open_graphs(open_package(sys.argv[1]), SessionConfig(threads=1))
(logits,) = sessions["decode"].run(["logits"], {"ids": [1, 2, 3]})
print(logits.tobytes().hex())
"""


def start(package: Package, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(package.path), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_build_is_cleared_up_by_the_next(package: Package, cache: Path) -> None:
    assert start(package, "die").wait() == 9
    left = [path.name for path in cache.iterdir() if path.is_dir()]
    assert [".tmp-" in name for name in left] == [True]
    entry = entry_of(prepare(package, CONFIG))
    assert [path for path in cache.iterdir() if path.is_dir()] == [entry]


def test_processes_at_once_do_not_disturb_each_other(package: Package, cache: Path) -> None:
    processes = [start(package, "run") for _ in range(3)]
    texts = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(texts)) == 1
    (entry,) = cache.iterdir()
    assert prepacked_entry.read_note(entry) is not None


def test_while_another_process_builds_own_files_are_used(package: Package, cache: Path) -> None:
    entry = entry_of(prepare(package, CONFIG))
    (entry / "prepacked.json").unlink()
    with package_swap.writer_lock(entry):
        assert_falls_back(package, "is being written by another onnxlm process")


def test_only_the_cpu_packs(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "_build", no_build)
    prepared = prepare(package, SessionConfig(provider="cuda"))
    assert prepared == PreparedGraphs(own_files(package), False, "provider 'cuda' packs no weights")
    unknown = prepare(package, SessionConfig(provider="abacus"))
    assert "'abacus'" in str(unknown.reason)
