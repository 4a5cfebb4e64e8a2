"""What is read from the system: memory, energy, the load of others, the machine, its own rates."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.packages import sample_manifest, write_package

from onnxlm.runtime import foreign_load, roofline
from onnxlm.runtime.bench_package import file_bytes, worst_quality
from onnxlm.runtime.energy import EnergyMeter
from onnxlm.runtime.foreign_load import ForeignLoad
from onnxlm.runtime.machine import describe_machine
from onnxlm.runtime.memory import Memory, read_memory
from onnxlm.runtime.roofline import MatrixProduct, MemoryReader, Roofline, read_bytes_per_s

STATUS = "Name:\tpython\nVmPeak:\t 900 kB\nVmHWM:\t     300 kB\nVmRSS:\t 200 kB\n"
ROLLUP = (
    "55e0-7ffd ---p 00000000 00:00 0   [rollup]\nRss: 200 kB\nPss:      150 kB\nPss_Dirty: 9 kB\n"
)


def write_proc(proc: Path, pid: str, **files: str) -> Path:
    folder = proc / pid
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="ascii")
    return proc


def test_memory_in_bytes(tmp_path: Path) -> None:
    proc = write_proc(tmp_path, "7", status=STATUS, smaps_rollup=ROLLUP)
    assert read_memory(7, proc) == Memory(300 * 1024, 150 * 1024)


def test_without_pss_the_rest_is_told(tmp_path: Path) -> None:
    proc = write_proc(tmp_path, "7", status=STATUS)
    note = f"PSS not measured on {sys.platform}"
    assert read_memory(7, proc) == Memory(300 * 1024, None, note)


def test_without_proc_another_process_is_unknown(tmp_path: Path) -> None:
    note = f"peak RSS and PSS not measured on {sys.platform}"
    assert read_memory(7, tmp_path) == Memory(None, None, note)


@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage")
def test_without_proc_this_process_still_knows_its_peak(tmp_path: Path) -> None:
    found = read_memory(None, tmp_path)
    assert found.peak_rss_bytes is not None
    assert found.peak_rss_bytes > 10_000_000
    assert found.note == f"PSS not measured on {sys.platform}"


WRITES = """
import numpy as np
from onnxlm.runtime.memory import read_memory

before = read_memory().pss_bytes
block = np.ones(64 << 20, dtype=np.uint8)
after = read_memory()
print(before, after.pss_bytes, after.peak_rss_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_pss_grows_by_what_is_written() -> None:
    """In a process of its own: one that has run tests has memory to give back at any moment."""
    ran = subprocess.run([sys.executable, "-c", WRITES], check=True, capture_output=True, text=True)
    before, after, peak = map(int, ran.stdout.split())
    assert 60 << 20 < after - before < 80 << 20
    assert peak >= 64 << 20


Clock = Callable[[int, int, float], None]


@pytest.fixture
def ticking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the machine's busy ticks, the process's own and the time."""
    if not hasattr(os, "sysconf"):
        pytest.skip("no ticks")
    now = [0.0]
    monkeypatch.setattr(foreign_load, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(foreign_load.os, "sysconf", lambda name: 100)

    def tick(busy: int, own: int, seconds: float) -> None:
        (tmp_path / "7").mkdir(exist_ok=True)
        # user nice system idle iowait irq softirq steal guest: guest is a part of user
        machine = f"cpu  {busy - 60} 10 20 5000 600 10 10 10 77 0\ncpu0 1 2 3\n"
        (tmp_path / "stat").write_text(machine, encoding="ascii")
        process = f"7 (a) b (c) S 1 7 7 0 -1 0 0 0 0 0 {own - 30} 30 99 99 20\n"
        (tmp_path / "7" / "stat").write_text(process, encoding="ascii")
        now[0] = seconds

    tick(1000, 100, 0.0)
    return tick


def test_cores_that_others_used(ticking: Clock, tmp_path: Path) -> None:
    load = ForeignLoad(7, tmp_path)
    ticking(1800, 500, 2.0)  # 8 s of work in 2 s, 4 of them its own: others kept 2 cores busy
    assert load.cores() == pytest.approx(2.0)


def test_no_load_is_less_than_none(ticking: Clock, tmp_path: Path) -> None:
    load = ForeignLoad(7, tmp_path)
    ticking(1100, 201, 2.0)  # ticks of the machine and the process are not counted at one moment
    assert load.cores() == 0.0


def test_where_the_system_is_silent_there_is_no_load(tmp_path: Path) -> None:
    assert ForeignLoad(7, tmp_path).cores() is None


def test_the_machine_by_its_own_words(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    one = "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: fpu avx2 avx512_vnni sse2\n"
    cpuinfo.write_text(f"{one}\n{one.replace('Some', 'Other')}", encoding="utf-8")
    found = describe_machine(cpuinfo)
    assert found.cpu == "Some CPU @ 3 GHz"
    assert found.cpu_flags == ("avx2", "avx512_vnni")
    assert found.cores >= 1
    assert found.libraries["numpy"] == np.__version__


def test_an_arm_machine_names_features(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor: 0\nFeatures: fp asimd asimddp i8mm\n", encoding="utf-8")
    assert describe_machine(cpuinfo).cpu_flags == ("asimd", "asimddp", "i8mm")


def test_a_silent_machine_has_no_flags(tmp_path: Path) -> None:
    found = describe_machine(tmp_path / "nothing")
    assert found.cpu_flags == ()
    assert found.cpu


def test_every_byte_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    reader = MemoryReader(threads=3, nbytes=8 * 1000)
    monkeypatch.setattr(roofline.np, "max", lambda part: read.append(part.nbytes))
    assert reader.read() > 0
    assert (len(read), sum(read), reader.nbytes) == (3, 8000, 8000)


def test_the_best_pass_is_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter([0.5, 0.25, 1.0])
    reader = SimpleNamespace(nbytes=1000, read=lambda: next(passes))
    monkeypatch.setattr(roofline, "MemoryReader", lambda threads: reader)
    assert read_bytes_per_s(2, passes=3) == 4000.0


@pytest.mark.parametrize("integer", [False, True])
def test_a_product_of_matrices_is_one(integer: bool) -> None:
    product = MatrixProduct(threads=1, integer=integer, size=24)
    assert product.flops == 2 * 24**3
    assert product.multiply() > 0
    found = product.result.numpy()
    # Ones by ones: every element is the number of rows.
    assert (found == np.full((24, 24), 24)).all()


def test_rates_are_work_by_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "read": iter([0.05, 0.025, 1.0]),
        "fp32": iter([0.02, 0.03, 0.01, 0.001]),
        "int8": iter([1.0, 0.5, 0.1]),
    }
    found = Roofline(1)
    monkeypatch.setattr(
        found, "_reader", SimpleNamespace(nbytes=1000, read=lambda: next(times["read"]))
    )
    fp32, int8 = (
        SimpleNamespace(flops=600, multiply=lambda name=name: next(times[name]))
        for name in ("fp32", "int8")
    )
    monkeypatch.setattr(found, "_products", (fp32, int8))
    assert found.rates() == {
        "read_bytes_per_s": 40_000.0,  # two passes are enough
        "fp32_flops_per_s": 60_000.0,  # three, which make 60 ms
        "int8_ops_per_s": 1200.0,
    }


def write_rapl(folder: Path, **counters: int) -> Path:
    for name, value in counters.items():
        zone = folder / f"intel-rapl:{name.removeprefix('p').replace('_', ':')}"
        zone.mkdir(parents=True, exist_ok=True)
        (zone / "energy_uj").write_text(f"{value}\n", encoding="ascii")
        (zone / "max_energy_range_uj").write_text("9999999\n", encoding="ascii")
        (zone / "name").write_text("core\n" if "_" in name else f"package-{name[1:]}\n", "ascii")
    return folder


def test_joules_of_all_packages(tmp_path: Path) -> None:
    # p0_0 is a part of package 0, and must not count twice.
    meter = EnergyMeter(write_rapl(tmp_path, p0=1_000_000, p1=9_000_000, p0_0=0))
    assert meter.note == ""
    before = meter.start()
    write_rapl(tmp_path, p0=1_500_000, p1=1_000_000, p0_0=400_000)
    # Half a joule; and from 9 over the counter's end of 10 to 1, two more.
    assert meter.joules_since(before) == pytest.approx(2.5)


def test_the_whole_board_is_not_counted_beside_its_packages(tmp_path: Path) -> None:
    meter = EnergyMeter(board(tmp_path))
    before = meter.start()
    write_rapl(tmp_path, p0=2_000_000, p1=3_000_000)
    board(tmp_path)
    assert meter.joules_since(before) == pytest.approx(1.0)


def board(powercap: Path) -> Path:
    """Zone 1 is the board, which counts what package 0 takes, and more."""
    if not (powercap / "intel-rapl:0").exists():
        write_rapl(powercap, p0=1_000_000, p1=1_000_000)
    (powercap / "intel-rapl:1" / "name").write_text("psys\n", encoding="ascii")
    return powercap


def test_without_counters_there_is_a_word(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path)
    assert meter.note == f"energy not measured: {sys.platform} shows no RAPL here"
    assert meter.joules_since(meter.start()) is None


def test_counters_that_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rapl(tmp_path, p0=1)
    monkeypatch.setattr(
        Path, "read_text", lambda self, **kw: (_ for _ in ()).throw(PermissionError)
    )
    meter = EnergyMeter(tmp_path)
    assert meter.note == f"energy not measured: {tmp_path} may not be read by this user"
    assert meter.joules_since(meter.start()) is None


def test_the_worse_of_two_graphs_is_shown() -> None:
    manifest = sample_manifest()
    assert worst_quality(manifest) == {}
    figures = {
        "prefill_kl": 0.01,
        "decode_kl": 0.02,
        "decode_kl_max": 3.0,
        "prefill_top1": 0.9,
        "decode_top1": 0.95,
        "prefill_perplexity": 12.0,
    }
    recorded = dataclasses.replace(manifest, quality=figures)
    assert worst_quality(recorded) == {"kl": 0.02, "top1": 0.9}


def test_graphs_and_weights_are_the_file_size(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", weights=b"w" * 1000)
    # Two graphs of two bytes; config.json and the manifest do not count.
    assert file_bytes(package.manifest) == 1004
