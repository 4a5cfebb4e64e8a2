"""Packed graphs in the cache: one copy of the weights, the same results, and keys that tell what differs."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from support.packed_graphs import (
    CONFIG,
    Sizes,
    assert_same,
    entry_of,
    outputs,
    own_outputs,
    write_package,
)

from onnxlm.package import Package
from onnxlm.runtime import prepacked
from onnxlm.runtime.prepacked import PreparedGraphs, cpu_identity, open_graphs, own_files, prepare
from onnxlm.runtime.session import SessionConfig

FILES = {"graph-prefill.onnx", "graph-decode.onnx", "weights.bin", "prepacked.json"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed graphs, empty."""
    monkeypatch.setenv("ONNXLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepacked"


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "model")


def no_build(*_: Any) -> None:
    raise AssertionError("was built again")


def test_results_are_the_same_bit_for_bit(package: Package, cache: Path) -> None:
    expected = own_outputs(package)
    for _ in range(2):  # built, then found
        sessions, prepared = open_graphs(package, CONFIG)
        assert (prepared.cached, prepared.reason) == (True, None)
        assert_same(outputs(sessions), expected)
    (entry,) = cache.iterdir()
    assert {file.name for file in entry.iterdir()} == FILES


def test_an_entry_is_built_once(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(package, CONFIG)
    monkeypatch.setattr(prepacked, "write_prepacked", no_build)
    assert prepare(package, CONFIG) == first
    assert (
        prepare(package, SessionConfig(threads=2)) == first
    )  # threads change nothing of what is packed


def test_graphs_share_weights_and_their_packed_forms(package: Package) -> None:
    """Every blob lies once in the data file; prefill's own matrix is the only thing that decode lacks."""
    prepared = prepare(package, CONFIG)
    blobs: dict[str, dict[str, set[tuple[int, int]]]] = {}
    for name, path in prepared.paths.items():
        blobs[name] = {}
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if not entries:
                continue
            assert entries["location"] == "weights.bin"
            found = {(int(entries["offset"]), int(entries["length"]))}
            for key, value in entries.items():
                if key.startswith("prepacked"):
                    parts = [part.split(";") for part in value.split("|")[1:]]
                    found |= {(int(offset), int(length)) for offset, length, _ in parts}
            blobs[name][tensor.name] = found
    prefill, decode = blobs["prefill"], blobs["decode"]
    assert prefill.keys() - decode.keys() == {"prefill_rows"}
    assert {name: prefill[name] for name in decode} == decode
    for name in ("blocks", "matrix", "prefill_rows"):
        assert len(prefill[name]) == 2, f"{name} is not packed"
    # The tied head is the table in another shape: one raw copy, and a packed one of its own.
    assert prefill["table"] < prefill["head"]
    # Nothing overlaps, nothing is left over but what alignment needs.
    places = sorted(set.union(*prefill.values()))
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
    size = (entry_of(prepared) / "weights.bin").stat().st_size
    assert size - sum(size for _, size in places) < 4096 * len(places)


def test_packed_graphs_are_not_optimized_again(package: Package) -> None:
    prepared = prepare(package, CONFIG)
    disabled = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert prepared.session_options(CONFIG).graph_optimization_level == disabled
    own = PreparedGraphs(own_files(package), cached=False)
    assert own.session_options(CONFIG).graph_optimization_level != disabled


MEASURE = """
import json, sys
from pathlib import Path
from onnxlm.package import open_package
from onnxlm.runtime.prepacked import PreparedGraphs, open_files, own_files, prepare
from onnxlm.runtime.session import SessionConfig

def held():
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {name: int(size) * 1024 for name, size, *_ in rows}
    return sizes["Pss_Anon:"], sizes["Pss_File:"]

package, config = open_package(sys.argv[1]), SessionConfig(threads=1)
prepared = PreparedGraphs(own_files(package), cached=False)
if sys.argv[2] == "packed":
    prepared = prepare(package, config)
    assert prepared.cached, prepared.reason
before = held()
sessions = open_files(prepared, config)
for session in sessions.values():
    session.run(None, {"ids": [1, 2, 3]})
print(json.dumps([now - then for now, then in zip(held(), before)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is shared")
def test_two_sessions_hold_one_copy(tmp_path: Path) -> None:
    # Packed: 10.5 MB fp32, 3.3 MB codes, 2.6 MB prefill's own, 1.6 MB head.
    package = write_package(tmp_path / "large", Sizes(vocabulary=1024, inputs=1280, outputs=2048))
    prepare(package, CONFIG)
    # glibc would keep some of what is freed, now more, now less.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    grown = {}
    for way in ("own", "packed"):
        command = [sys.executable, "-c", MEASURE, str(package.path), way]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        grown[way] = json.loads(done.stdout)
    (own_private, own_mapped), (private, mapped) = grown["own"], grown["packed"]
    both, once = 2 * (10.5e6 + 3.3e6 + 1.6e6) + 2.6e6, 18e6
    assert own_private - private > 0.9 * both, grown
    assert mapped - own_mapped < 1.25 * once, grown


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(prepacked, "cpu_identity", lambda: "another CPU"),
        lambda patch: patch.setattr(prepacked.ort, "__version__", "0.0.0"),
        lambda patch: patch.setattr(prepacked, "VERSION", "0.0.0"),
        lambda patch: patch.setattr(prepacked, "_FORMAT", 0),
    ],
    ids=["cpu", "onnxruntime", "onnxlm", "format"],
)
def test_what_packing_depends_on_is_in_the_key(
    package: Package, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = entry_of(prepare(package, CONFIG))
    change(monkeypatch)
    assert entry_of(prepare(package, CONFIG)) != before


def test_session_options_are_in_the_key(package: Package) -> None:
    options = {"session.disable_prepacking": "1"}
    other = SessionConfig(threads=1, options=options)
    assert entry_of(prepare(package, CONFIG)) != entry_of(prepare(package, other))
    sessions, _ = open_graphs(package, other)
    assert_same(outputs(sessions), own_outputs(package, other))


def test_a_replaced_package_replaces_its_entry(tmp_path: Path, cache: Path) -> None:
    other = entry_of(prepare(write_package(tmp_path / "other"), CONFIG))
    first = write_package(tmp_path / "model", seed=1)
    stale = entry_of(prepare(first, CONFIG))
    second = write_package(tmp_path / "model", seed=2)
    sessions, prepared = open_graphs(second, CONFIG)
    assert_same(outputs(sessions), own_outputs(second))
    assert entry_of(prepared) != stale
    assert set(cache.iterdir()) == {other, entry_of(prepared)}


def test_a_build_drops_what_is_not_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = [write_package(tmp_path / str(seed), seed=seed) for seed in range(3)]
    unused, used = (entry_of(prepare(package, CONFIG)) for package in packages[:2])
    abandoned, current = cache / ".x.tmp-1-a", cache / ".y.tmp-2-b"
    for folder in (abandoned, current):
        folder.mkdir()
    day = 24 * 3600
    for entry, days in ((unused, 31), (used, 31)):
        os.utime(entry / "prepacked.json", (time.time() - days * day,) * 2)
    os.utime(abandoned, (time.time() - 2 * day,) * 2)
    assert entry_of(prepare(packages[1], CONFIG)) == used  # a use makes it young again
    new = entry_of(prepare(packages[2], CONFIG))
    assert set(cache.iterdir()) == {used, new, current}


def test_a_build_drops_what_was_made_of_a_deleted_package(tmp_path: Path, cache: Path) -> None:
    gone, stays = (write_package(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    kept = [entry_of(prepare(package, CONFIG)) for package in (gone, stays)][1]
    shutil.rmtree(gone.path)
    new = entry_of(prepare(write_package(tmp_path / "c", seed=2), CONFIG))
    assert set(cache.iterdir()) == {kept, new}


def test_names_of_graphs_reach_no_file(tmp_path: Path, cache: Path) -> None:
    names = {"prefill": "../../outside", "decode": "/decode"}
    hostile = write_package(tmp_path / "hostile", names=names)
    before = Counter(tmp_path.iterdir())
    sessions, prepared = open_graphs(hostile, CONFIG)
    assert {file.name for file in entry_of(prepared).iterdir()} == FILES
    assert Counter(tmp_path.iterdir()) - before == Counter([cache.parent])
    assert_same(outputs(sessions), own_outputs(hostile))


def test_the_note_says_what_it_was_made_of(package: Package) -> None:
    prepared = prepare(package, CONFIG)
    note = json.loads((entry_of(prepared) / "prepacked.json").read_text(encoding="utf-8"))
    assert (note["package"], note["digest"]) == (str(package.path.resolve()), package.digest)
    assert note["files"].keys() == FILES - {"prepacked.json"}


X86 = (
    "processor\t: 0\nvendor_id\t: A\nmodel name\t: One\ncpu MHz\t\t: 1.5\nflags\t\t: avx2 vnni\n\n"
)
ARM = "processor\t: 0\nBogoMIPS\t: 48.00\nFeatures\t: asimd sve\nCPU part\t: 0xd40\n\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (X86, ["vendor_id: A", "model name: One", "flags: avx2 vnni"]),
        (ARM, ["Features: asimd sve", "CPU part: 0xd40"]),
    ],
    ids=["x86", "arm"],
)
def test_a_cpu_is_told_by_model_and_instructions(
    tmp_path: Path, text: str, told: list[str]
) -> None:
    cpuinfo, absent = tmp_path / "cpuinfo", tmp_path / "absent"
    cpuinfo.write_text(text + text.replace("0", "1"), encoding="utf-8")
    portable = cpu_identity(absent).split("\n")
    assert portable[0] == sys.platform
    assert cpu_identity(cpuinfo).split("\n") == portable + told
