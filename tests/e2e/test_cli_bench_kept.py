"""What `onnxlm bench` has measured is shown and written, whatever else goes wrong; its sessions' options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Ran
from support.reports import contestant, report, row

from onnxlm.cli import output_files
from onnxlm.cli.bench_options import thread_counts
from onnxlm.runtime import bench_run
from onnxlm.runtime.bench import Plan
from onnxlm.runtime.bench_report import Report, read_report
from onnxlm.runtime.bench_run import Entry
from onnxlm.runtime.cores import usable_cores

Cli = Callable[..., Ran]
STEADY = [100.0, 101.0, 99.0, 100.5, 99.5]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """A run that costs nothing, of `report_of`; what it was asked to run."""
    asked: list[Entry] = []

    def run(entries: list[Entry], plan: Plan, progress: Any) -> Report:
        asked.extend(entries)
        return report_of("package")

    monkeypatch.setattr(bench_run, "run_benchmark", run)
    return asked


def report_of(name: str, **more: Any) -> Report:
    return report([contestant(name)], [row(0, STEADY, STEADY)], **more)


def saved(file: Path, found: Report) -> Path:
    file.write_text(found.to_json(), encoding="utf-8")
    return file


@pytest.mark.usefixtures("measured")
def test_a_run_with_nothing_to_compare_is_kept(
    cli: Cli, tiny_package: Path, tmp_path: Path
) -> None:
    old, new = saved(tmp_path / "old.json", report_of("other")), tmp_path / "new.json"
    ran = cli("bench", tiny_package, "--compare", old, "--json", new)
    assert ran.code == 0, ran.err
    assert "package  cpu" in ran.out
    assert "Changes" not in ran.out
    assert "nothing was compared: the run and the old report have no figures in common" in ran.err
    assert "only in the old report: other on cpu" in ran.err
    assert read_report(new).rows


def test_an_interrupted_run_is_kept_whatever_it_is_compared_with(
    cli: Cli, tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = dataclasses.replace(row(0, [], []), failure="interrupted before its turn")
    found = report([contestant("package")], [early], interrupted=True)
    monkeypatch.setattr(bench_run, "run_benchmark", lambda *rest, **more: found)
    old, new = saved(tmp_path / "old.json", report_of("other")), tmp_path / "new.json"
    ran = cli("bench", tiny_package, "--compare", old, "--json", new)
    assert ran.code == 130
    assert "0 rounds: median" in ran.out
    assert "interrupted: 0 of 5 rounds were run to the end" in ran.err
    assert read_report(new) == found


def test_an_interrupted_report_is_compared_without_an_interrupt(cli: Cli, tmp_path: Path) -> None:
    old = saved(tmp_path / "old.json", report_of("package"))
    new = saved(tmp_path / "new.json", report_of("package", interrupted=True))
    ran = cli("bench", "--compare", old, new)
    assert ran.code == 0, ran.err
    assert "Changes (" in ran.out


@pytest.mark.usefixtures("measured")
def test_one_file_that_cannot_be_written_costs_nothing_else(
    cli: Cli, tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = output_files.write_whole

    def full(path: Path, text: str) -> None:
        if path.suffix == ".json":
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(output_files, "write_whole", full)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "html")}
    files["json"].write_text("old", encoding="utf-8")
    ran = cli("bench", tiny_package, *(part for n, f in files.items() for part in (f"--{n}", f)))
    assert ran.code == 2
    assert "package  cpu" in ran.out
    assert ran.err.splitlines()[-1] == (
        f"error: {files['json']}: cannot be written; found No space left on device"
    )
    assert files["json"].read_text(encoding="utf-8") == "old"
    assert "# Benchmark" in files["markdown"].read_text(encoding="utf-8")
    assert "<h1>" in files["html"].read_text(encoding="utf-8")


def test_a_report_of_the_version_before_is_read(cli: Cli, tmp_path: Path) -> None:
    value = json.loads(report_of("package").to_json())
    value["schema"] = "onnxlm.bench/2"
    del value["warnings"]
    for who in value["contestants"]:
        for name in ("fallback", "nodes"):
            del who[name]
        for name in ("source", "options"):
            del who["label"][name]
    old, new = tmp_path / "old.json", saved(tmp_path / "new.json", report_of("package"))
    old.write_text(json.dumps(value), encoding="utf-8")
    ran = cli("bench", "--compare", old, new)
    assert ran.code == 0, ran.err
    assert "TTFT ms" in ran.out.partition("Changes (")[2]


def test_0_threads_is_all_cores_wherever_it_stands() -> None:
    cores = usable_cores()
    assert thread_counts("0") == (cores,)
    assert thread_counts(f"0,{cores + 1}, 0") == (cores, cores + 1)
    assert thread_counts(f"{cores},0") == (cores,)


def test_options_of_the_session_reach_the_providers_that_have_them(
    cli: Cli, tiny_package: Path, measured: list[Entry]
) -> None:
    options = ("--kv-budget", "1GB", "--device-id", "1", "--gpu-mem-limit", "2GB")
    ran = cli(
        *("bench", tiny_package, "--provider", "cpu,cuda", "--threads", "1"),
        *(*options, "--graph-capture"),
    )
    assert ran.code == 0, ran.err
    cpu, cuda = measured
    assert cpu.spec.fields["options"] == cpu.label.options == {"kv_budget": 10**9}
    assert cuda.spec.fields["options"] == {
        **{"kv_budget": 10**9, "device_id": 1},
        **{"gpu_mem_limit": 2 * 10**9, "graph_capture": True},
    }


def test_a_cache_over_its_budget_is_a_row(
    cli: Cli, tiny_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run._Machine, "open", lambda self, threads: None)
    ran = cli(
        *("bench", tiny_package, "--batch", "1,512", "--kv-budget", "1MB"),
        *("--prompt-tokens", "8", "--new-tokens", "3", "--repeats", "1", "--threads", "1"),
    )
    assert ran.code == 0, ran.err
    assert "not run: package on cpu, prompt 8, batch 512: the key and value cache has no" in ran.out
    assert [line.split()[4] for line in ran.out.splitlines()[4:6]] == ["1", "512"]
    assert "not run" not in ran.out.splitlines()[4]
