"""Cores by affinity and by quotas of control groups of both versions; what threads burn when nothing runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.runtime_models import hot_package

from onnxlm.runtime.cores import usable_cores

ROOT = "0::/\n"
# Version 1 lists controllers, version 2 none.
NESTED = "0::/user.slice/job.scope\n"
NESTED_1 = "12:cpu,cpuacct:/batch/job\n3:memory:/batch\n"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (ROOT, {}, 8),
        (ROOT, {"cpu.max": "max 100000\n"}, 8),
        (ROOT, {"cpu.max": "300000 100000\n"}, 3),
        (ROOT, {"cpu.max": "250000 100000\n"}, 2),
        (ROOT, {"cpu.max": "50000 100000\n"}, 1),
        (ROOT, {"cpu.max": "6400000 100000\n"}, 8),
        (ROOT, {"cpu.max": "nonsense\n"}, 8),
        (NESTED, {"user.slice/job.scope/cpu.max": "200000 100000\n"}, 2),
        (
            NESTED,
            {"user.slice/cpu.max": "100000 100000\n", "user.slice/job.scope/cpu.max": "max 1\n"},
            1,
        ),
        # In a container the path is what the group is called outside.
        (NESTED, {"cpu.max": "400000 100000\n"}, 4),
        (ROOT, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        (ROOT, {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        (
            NESTED_1,
            {
                "cpu,cpuacct/batch/job/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/batch/job/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_a_quota_gives_fewer_cores_than_the_machine_has(
    own: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "own").write_text(own, encoding="ascii")
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    assert usable_cores(tmp_path, tmp_path / "own") == cores


def test_a_system_without_affinity_and_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, cores in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert usable_cores(tmp_path, tmp_path / "own") == cores


@pytest.mark.skipif(shutil.which("taskset") is None, reason="there is no taskset")
def test_taskset_to_one_core_is_one_thread() -> None:
    program = (
        "from onnxlm.runtime.session import SessionConfig, session_options\n"
        "print(session_options(SessionConfig()).intra_op_num_threads)"
    )
    core = str(min(os.sched_getaffinity(0)))
    ran = subprocess.run(
        ["taskset", "-c", core, sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "1\n"


IDLE = """
import sys, time
from onnxlm.runtime import load
from onnxlm.runtime.engine import Batch

model = load(sys.argv[1], threads=2)
prompt = [1 + number % 90 for number in range(100)]
model.generate([prompt], max_new_tokens=32)
before = time.process_time()
time.sleep(1)
idle = time.process_time() - before
batch = Batch(model.sessions, 1)
batch.prefill_tokens([prompt])
before = time.process_time()
time.sleep(0.2)
print(idle, time.process_time() - before)
"""


def test_nothing_burns_a_core_between_requests() -> None:
    """Of the whole process: threads of a pool may spin for a moment."""
    ran = subprocess.run(
        [sys.executable, "-c", IDLE, hot_package("ort").path],
        check=True,
        capture_output=True,
        text=True,
    )
    after_generate, after_prefill = map(float, ran.stdout.split())
    assert after_generate < 0.05
    assert after_prefill < 0.05
